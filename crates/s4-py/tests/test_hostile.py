"""Files and environments that are made to do harm."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
import s4weights.numpy
from s4weights import _save
from s4weights._explain import find_refused
from test_corrupt import write_tree


def save_stream(stream: bytes, path: Path, state: object = None) -> None:
    """Writes a file whose object is this pickle stream."""
    storages, _ = _save.describe({} if state is None else state, pickle, 2)
    writer = s4weights._core.Writer(os.fspath(path), None, None, "fast", 1, {})
    from s4weights._device import Compute
    from s4weights._progress import Progress

    storages.write(writer, Progress(None, 0, "save"), Compute("cpu", None))
    writer.finish(None, {"pickle": stream}, {})


REFUSED = b"cos\nsystem\n"
NESTED = {
    # Tuples that each hold the one before twice; the last is a dict's key, and part of key paths.
    "keys": b"\x80\x02K\x01" + b"q\x00h\x00\x86" * 3000 + b"q\x01}h\x01" + REFUSED + b"s.",
    # Calls whose two arguments are both the result of the call before.
    "calls": b"\x80\x02" + REFUSED + b"q\x00" + b"q\x01h\x00h\x01h\x01\x86R" * 3000 + b".",
    "spread": b"\x80\x02" + REFUSED + b"q\x00" + b"h\x00q\x01\x85h\x01\x86R" * 3000 + b".",
    "duplicates": b"\x80\x02" + REFUSED + b"\x85" + b"2\x86" * 5000 + b".",
    "deep": b"\x80\x02" + b"}X\x01\x00\x00\x00a" * 20_000 + REFUSED + b"s" * 20_000 + b".",
    "lists": b"\x80\x02" + b"]" * 50_000 + REFUSED + b"a" * 50_000 + b".",
    "marks": b"\x80\x02" + b"K\x01" * 20_000 + b"(1" * 50_000 + REFUSED + b".",
    "names": b"\x80\x02]("
    + b"".join(b"c" + b"m%d" % i + b"\nf\n" for i in range(20_000))
    + b"e.",
    "appends": b"\x80\x02]" + b"K\x01a" * 100_000 + REFUSED + b"a.",
    "long key": b"\x80\x02}X\x00\x00\x10\x00" + b"k" * (1 << 20) + REFUSED + b"s.",
}


@pytest.mark.parametrize("stream", NESTED.values(), ids=NESTED)
def test_explaining_a_refusal_is_bounded_by_the_stream(stream: bytes) -> None:
    tracemalloc.start()
    start = time.process_time()
    try:
        found = find_refused(stream)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Python code interprets each opcode, traced: some microseconds and some hundred bytes each.
    assert time.process_time() - start < 10
    assert peak < (8 << 20) + 400 * len(stream)
    assert found and len(found) <= 9
    assert all(len(path) < 20_000 for path, _ in found)


def test_the_message_of_a_refusal_is_bounded(path: Path) -> None:
    name = b"n" * (1 << 20)
    save_stream(b"\x80\x02c" + name + b"\n" + name + b"\n.", path)
    with pytest.raises(s4weights.UnsafeLoadError) as raised:
        s4weights.load(path)
    assert len(str(raised.value)) < 20_000


def test_keys_are_still_told_as_they_are(path: Path) -> None:
    class Weird:
        pass

    obj: Any = {"a": [{("x", 1): Path("p")}], None: {3: Path}}
    s4weights.save(obj, path)
    with pytest.raises(s4weights.UnsafeLoadError) as raised:
        s4weights.load(path)
    assert raised.value.key_path == "a.0.(x, 1)"
    assert "pathlib" in str(raised.value.global_name)


def test_a_damaged_pickle_is_corrupt_data(tmp_path: Path) -> None:
    # Forget what other tests allowed: an allowed function of the caller's may raise anything.
    torch.serialization.clear_safe_globals()
    state = {"w": torch.rand(100), "x": range(3)}
    _, about = _save.describe(state, pickle, 2)
    stream = about.blobs.get("pickle")
    assert stream is not None
    path = tmp_path / "a.s4w"
    for i in range(0, len(stream), 3):
        flipped = bytearray(stream)
        flipped[i] ^= 0x55
        for damaged in (stream[:i], bytes(flipped), stream[:i] + stream[i + 1 :]):
            save_stream(damaged, path, state)
            try:
                s4weights.load(path)
            except Exception as error:
                # A damaged tag may name a device of another machine, which PyTorch reports.
                tag = isinstance(error, RuntimeError) and "data location" in str(error)
                assert tag or isinstance(error, s4weights.S4Error), (i, error)
        # Safe without `weights_only`: a cut stream runs nothing that the whole one does not.
        save_stream(stream[:i], path, state)
        for arguments in ({}, {"weights_only": False}):
            with pytest.raises(s4weights.CorruptDataError):
                s4weights.load(path, **arguments)


def test_what_a_function_of_the_caller_raises_is_passed_on(path: Path) -> None:
    def place(storage: Any, location: str) -> Any:
        raise KeyError("mine")

    s4weights.save({"w": torch.rand(10), "x": {1: range(3)}}, path)
    with pytest.raises(KeyError, match="mine"):
        s4weights.load(path, place, weights_only=False)


def test_messages_about_persistent_ids_are_bounded(path: Path) -> None:
    """No message writes out tuples that each hold the one before twice."""
    stream = b"\x80\x02K\x01" + b"q\x00h\x00\x86" * 200 + b"Q."
    save_stream(stream, path)
    start = time.process_time()
    with pytest.raises(s4weights.S4Error) as raised:
        s4weights.load(path)
    assert time.process_time() - start < 5 and len(str(raised.value)) < 20_000


def save_tree(root: object, path: Path) -> None:
    """Writes a file with this tree and one tensor."""
    storages, _ = _save.describe({"w": torch.rand(4)}, pickle, 2)
    writer = s4weights._core.Writer(os.fspath(path), None, None, "fast", 1, {})
    from s4weights._device import Compute
    from s4weights._progress import Progress

    storages.write(writer, Progress(None, 0, "save"), Compute("cpu", None))
    writer.finish(json.dumps({"root": root}), {}, {})


@pytest.mark.parametrize("name", ["onnx", "_dynamo", "compile", "__path__", "x" * 9999])
def test_names_of_dtypes_are_looked_up_in_a_table(tmp_path: Path, name: str) -> None:
    for i, node in enumerate(({"torch.dtype": name}, {"tensor": 0, "dtype": name})):
        save_tree({"dict": [["a", node]]}, tmp_path / f"{i}.s4w")
    script = """
import sys, torch, s4weights
before = set(sys.modules)
for path in sys.argv[1:]:
    try:
        s4weights.load(path)
    except s4weights.CorruptDataError as error:
        assert "no dtype" in str(error) and len(str(error)) < 500
    else:
        raise AssertionError
new = {m for m in set(sys.modules) - before if m.startswith("torch.")}
assert not new, new
"""
    files = [str(tmp_path / f"{i}.s4w") for i in range(2)]
    done = subprocess.run([sys.executable, "-c", script, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_dtype_comes_back(path: Path) -> None:
    dtypes = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
    s4weights.save({"dtypes": dtypes}, path)
    assert s4weights.load(path)["dtypes"] == dtypes


@pytest.mark.parametrize(
    "node",
    [
        {"tensor": 0, "shape": [1 << 62] * 20_000},
        {"tensor": 0, "shape": [1] * 65},
        {"tensor": 0, "shape": [1 << 70]},
        {"tensor": 0, "shape": [2], "stride": [1 << 64]},
        {"tensor": 0, "device": {"a": 1}},
        {"torch.device": 0},
        {"tensor": 0, "shape": ["x" * (1 << 20)]},
    ],
    ids=range(7),
)
def test_trees_that_ask_for_too_much(path: Path, node: object) -> None:
    save_tree({"dict": [["a", node]]}, path)
    start = time.process_time()
    with pytest.raises(s4weights.CorruptDataError) as raised:
        s4weights.load(path, map_location="cpu")
    assert time.process_time() - start < 5 and len(str(raised.value)) < 2000


def test_names_of_shared_tuples_are_bounded(path: Path) -> None:
    key: Any = (1,)
    for _ in range(16):
        key = (key, key)
    nested: Any = {"w": torch.rand(3)}
    for _ in range(200):
        nested = [nested]
    s4weights.save({"a": {key: torch.rand(3)}, "b": nested}, path)
    names = [t["name"] for t in s4weights.inspect(path)["tensors"]]
    assert len(names) == 2 and all(len(name) <= 4096 for name in names)


def test_no_library_of_the_working_directory_is_loaded(tmp_path: Path) -> None:
    """Neither with ``python -c`` nor with ``-m``, both of which search there for modules."""
    folder = tmp_path / "nvidia" / "libnvcomp" / "lib64"
    folder.mkdir(parents=True)
    (folder / "libnvcomp.so.6").write_bytes(b"")
    (folder.parent / "__init__.py").write_text("open('imported', 'w')")
    (tmp_path / "nvidia" / "__init__.py").write_text("open('imported', 'w')")
    script = """
import ctypes, s4weights
from s4weights import _nvcomp
loaded = []
ctypes.CDLL = lambda path, *rest: loaded.append(path)
_nvcomp.load_nvcomp()
print([path for path in loaded if "site-packages" not in path])
"""
    (tmp_path / "script.py").write_text(script)
    environment = {k: v for k, v in os.environ.items() if k != "NVCOMP_LIBRARY"}
    for arguments in (["-c", script], ["-m", "script"]):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.stdout == "[]\n", done.stderr
    assert not (tmp_path / "imported").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="names are text there")
def test_variables_in_any_encoding(path: Path) -> None:
    script = """
import sys, torch, s4weights
for work in (
    lambda: s4weights.save({"w": torch.rand(3)}, sys.argv[1]),
    lambda: s4weights.save({"w": torch.rand(3)}, "memory://a/b.s4w"),
    lambda: s4weights.CheckpointStore("memory://a/s").save_checkpoint({}, 0),
):
    work()
try:
    s4weights.load("s3://bucket/none.s4w")
except ValueError as error:
    # One of the provider's own may be what was meant to be used: it is named.
    assert "`AWS_X` is not UTF-8" in str(error), error
else:
    raise AssertionError("a variable of the provider's was passed over")
"""
    environment = {**os.environb, b"S4_ODD": b"\xff\xfe", b"AWS_ODD\xff": b"x", b"AWS_X": b"\xff"}
    command = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_streams_are_used_by_the_thread_that_calls(path: Path) -> None:
    import threading

    threads = set()

    class Stream(io.BytesIO):
        def write(self, data: Any) -> int:
            threads.add(threading.get_ident())
            return super().write(data)

    s4weights.save({"w": torch.rand(1 << 20)}, Stream())
    assert threads == {threading.get_ident()}


def test_attributes_that_hide_methods(path: Path) -> None:
    names = ["items", "keys", "values", "__class__", "_fields"]
    attributes = {"dict": [[name, 2] for name in names]}
    for node in ({"odict": [["w", {"tensor": 0}]], "attrs": attributes},):
        write_tree(path, {"root": {"dict": [["a", node]]}}, t=torch.ones(3))
        assert list(s4weights.open(path)) == list(s4weights.numpy.open(path)) == ["a.w"]
        target = {"a": {"w": torch.zeros(3)}}
        s4weights.load_into(target, path)
        assert target["a"]["w"].all()
        assert s4weights.load(path)["a"]["w"].all()
