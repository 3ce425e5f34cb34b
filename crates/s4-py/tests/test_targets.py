"""Targets and sources of files: paths, URLs, streams, and targets that fail."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
import s4weights.numpy
from compare import assert_identical

OBJ = {"weight": torch.arange(100_000.0), "step": 3}

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


class WriteOnly:
    """A stream with only the methods that saving needs. What it returns means nothing."""

    def __init__(self, returns: object = None) -> None:
        self.data = b""
        self.flushed = 0
        self._returns = returns

    def write(self, data: bytes) -> Any:
        self.data += data
        return self._returns

    def flush(self) -> None:
        self.flushed += 1


class ReadOnly:
    """A stream that cannot seek."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def read(self, size: int = -1) -> bytes:
        return self._data.read(size)


def saved(obj: Any = OBJ) -> bytes:
    stream = io.BytesIO()
    s4weights.save(obj, stream)
    return stream.getvalue()


def test_options_mean_the_same_everywhere(tmp_path: Path) -> None:
    """As for a store: options that a path does not use are accepted, misspelt ones are not."""
    path, url = str(tmp_path / "a.s4w"), f"memory://options/{tmp_path.name}.s4w"
    known, slip = {"region": "eu-west-1", "verify": "x"}, {"endpont_url": "hush"}
    uses: tuple[Callable[[Any], Any], ...] = (
        lambda place: s4weights.save(OBJ, place, storage_options=slip),
        lambda place: s4weights.load(place, storage_options=slip),
        lambda place: s4weights.verify(place, storage_options=slip),
    )
    for place in (path, Path(path), url, f"file://{path}"):
        s4weights.save(OBJ, place, storage_options=known)
        assert_identical(s4weights.load(place, storage_options=known), OBJ)
        for use in uses:
            with pytest.raises(ValueError, match=r"`endpont_url`.*`endpoint_url`") as caught:
                use(place)
            assert "hush" not in str(caught.value)
    store = s4weights.CheckpointStore(tmp_path / "store", storage_options=known)
    store.save_checkpoint(OBJ, 1)
    with pytest.raises(ValueError, match="`endpont_url`"):
        s4weights.CheckpointStore(tmp_path / "store", storage_options=slip).list()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"region": "x", "secret_access_key": b"hush"}, "secret_access_key: expected a string, not b"),
        ({"region": None}, "region: expected a string, not NoneType"),
        ({5: "hush"}, "expected a name, not 5"),
        ([("region", "x")], "expected a dict of names and values, not list"),
    ],
)
def test_options_are_strings(tmp_path: Path, options: Any, message: str) -> None:
    path = tmp_path / "a.s4w"
    s4weights.save(OBJ, path)
    uses: tuple[Callable[[], Any], ...] = (
        lambda: s4weights.save(OBJ, path, storage_options=options),
        lambda: s4weights.load(path, storage_options=options),
        lambda: s4weights.open(path, storage_options=options),
        lambda: s4weights.CheckpointStore(tmp_path / "store", storage_options=options),
    )
    for use in uses:
        with pytest.raises(TypeError, match=f"storage_options: .*{message}") as caught:
            use()
        assert "hush" not in str(caught.value)
    assert_identical(s4weights.load(path), OBJ)


def test_paths(tmp_path: Path) -> None:
    for target in (tmp_path / "a.s4w", str(tmp_path / "b.s4w"), tmp_path / "ü ☃.pt"):
        s4weights.save(OBJ, target)
        assert_identical(OBJ, s4weights.load(target))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.s4w", "b.s4w", "ü ☃.pt"]


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    s4weights.save(OBJ, "here.s4w")
    assert_identical(OBJ, s4weights.load("here.s4w"))


def test_the_same_bytes_to_every_target(path: Path) -> None:
    s4weights.save(OBJ, path)
    assert path.read_bytes() == saved()


@pytest.mark.parametrize("returns", [None, True, False, 0, 10, 1 << 40, "text"])
def test_write_only_streams(returns: object) -> None:
    """As `torch.save` does, `save` takes it that a stream takes everything."""
    stream = WriteOnly(returns)
    s4weights.save(OBJ, stream)  # type: ignore[arg-type]
    assert stream.data == saved() and stream.flushed == 1
    assert_identical(OBJ, s4weights.load(ReadOnly(stream.data)))  # type: ignore[arg-type]


class Filling(ReadOnly):
    """A custom stream that fills the memory it is given, a little at a time."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.seek, self.tell = self._data.seek, self._data.tell

    def read(self, size: int = -1) -> bytes:
        assert size >= 0, "read as a whole"
        return super().read(size)

    def readinto(self, memory: memoryview) -> int:
        return self._data.readinto(memory[:1_500_000])


def test_streams_that_fill_memory_are_not_asked_for_new_memory() -> None:
    for obj in (OBJ, {"large": torch.randn(1 << 20)}):
        data = saved(obj)
        stream: Any = Filling(b"xx" + data + data)
        stream.seek(2)
        assert_identical(obj, s4weights.load(stream))
        assert stream.tell() == 2 + len(data)
        assert_identical(obj, s4weights.load(stream))


def test_other_bytes_from_a_stream_that_cannot_seek() -> None:
    # The same error as from `torch.load`.
    with pytest.raises(AttributeError, match=r"file that is seekable.*io\.BytesIO"):
        s4weights.load(ReadOnly(b"data"))  # type: ignore[arg-type]


def test_open_files(path: Path) -> None:
    with open(path, "wb") as file:
        s4weights.save(OBJ, file)
    with open(path, "rb") as file:
        assert_identical(OBJ, s4weights.load(file))
        assert file.read() == b""
    with open(path, "rb", buffering=0) as raw:
        assert_identical(OBJ, s4weights.load(raw))
    s4weights.verify(path)


def test_streams_are_read_from_where_they_stand(path: Path) -> None:
    path.write_bytes(b"before" + saved())
    with open(path, "rb") as file:
        file.seek(6)
        assert_identical(OBJ, s4weights.load(file))
    stream = io.BytesIO(b"xx" + saved())
    stream.seek(2)
    assert_identical(OBJ, s4weights.load(stream))


def test_a_file_that_was_replaced_while_open(path: Path) -> None:
    s4weights.save(OBJ, path)
    with open(path, "rb") as file:
        s4weights.save({"other": 1}, path)
        assert_identical(OBJ, s4weights.load(file))


@linux
def test_pipes() -> None:
    read_end, write_end = os.pipe()

    def fill() -> None:
        with open(write_end, "wb") as pipe:
            s4weights.save(OBJ, pipe)

    thread = threading.Thread(target=fill)
    thread.start()
    with open(read_end, "rb") as pipe:
        assert_identical(OBJ, s4weights.load(pipe))
    thread.join()


def test_urls(tmp_path: Path) -> None:
    for url in (f"file://{tmp_path}/a.s4w", "memory://folder/a.s4w"):
        s4weights.save(OBJ, url)
        assert_identical(OBJ, s4weights.load(url))
        assert s4weights.verify(url)["tensors"] == 1
    with pytest.raises(s4weights.NotFoundError):
        s4weights.load("memory://folder/none.s4w")


def test_text_streams_are_refused(path: Path) -> None:
    with open(path, "w") as file, pytest.raises(TypeError):
        s4weights.save(OBJ, file)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="write"):
        s4weights.save(OBJ, 3)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="read"):
        s4weights.load(3)  # type: ignore[arg-type]


def test_what_a_stream_raises_is_passed_on() -> None:
    failure = OSError(errno.EIO, "broken")

    class Broken(WriteOnly):
        def write(self, data: bytes) -> int | None:
            raise failure

    with pytest.raises(OSError) as caught:
        s4weights.save(OBJ, Broken())  # type: ignore[arg-type]
    assert caught.value is failure


class Raw(io.RawIOBase):
    """A raw stream, which takes little at a time and says how much."""

    def __init__(self, most: int) -> None:
        self.data = b""
        self._most = most

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        taken = bytes(data[: self._most])
        self.data += taken
        return len(taken)


def test_a_raw_stream_takes_a_part() -> None:
    stream = Raw(1000)
    s4weights.save(OBJ, stream)  # type: ignore[arg-type]
    assert stream.data == saved()
    with pytest.raises(s4weights.StorageError):
        s4weights.save(OBJ, Raw(0))  # type: ignore[arg-type]


def test_an_unbuffered_temporary_file() -> None:
    with tempfile.NamedTemporaryFile(buffering=0) as file:
        stream = Raw(1000)
        file.file = stream  # type: ignore[assignment]
        s4weights.save(OBJ, file)
        assert stream.data == saved()


@linux
def test_a_named_pipe(tmp_path: Path) -> None:
    path, bytes_of = tmp_path / "pipe", {"ours": saved(), "torch": io.BytesIO()}
    os.mkfifo(path)
    torch.save(OBJ, bytes_of["torch"])
    for data in (bytes_of["ours"], bytes_of["torch"].getvalue()):  # type: ignore[union-attr]
        writer = threading.Thread(target=path.write_bytes, args=(data,))
        writer.start()
        assert_identical(OBJ, s4weights.load(path))
        writer.join()


def test_sets_are_written_in_one_order(tmp_path: Path) -> None:
    """Text is hashed in another way by each process."""
    script = (
        "import sys, s4weights\n"
        "names = {f'layer.{n}' for n in range(40)}\n"
        "s4weights.save({'a': names, 'b': {frozenset(names), (1, 'x'), None, 2.5}}, sys.argv[1])\n"
    )
    files = []
    for seed in ("1", "2"):
        path = tmp_path / seed
        command = [sys.executable, "-c", script, str(path)]
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, check=True)
        files.append(path.read_bytes())
    assert files[0] == files[1]
    names = {f"layer.{n}" for n in range(40)}
    assert s4weights.load(path) == {"a": names, "b": {frozenset(names), (1, "x"), None, 2.5}}


def test_sets_of_tensors(tmp_path: Path) -> None:
    tensors = [torch.full((2,), float(n)) for n in range(9)]
    s4weights.save({"set": {*tensors}, "list": tensors}, tmp_path / "a")
    loaded = s4weights.load(tmp_path / "a")
    assert {id(t) for t in loaded["list"]} == {id(t) for t in loaded["set"]}
    assert [t[0].item() for t in loaded["list"]] == [*range(9)]


@linux
def test_a_pipe_that_would_have_to_wait() -> None:
    """The `write` of a raw stream returns None if it took nothing."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with open(read_end, "rb"), open(write_end, "wb", buffering=0) as pipe:
        with pytest.raises(BlockingIOError, match="non-blocking") as caught:
            s4weights.save(OBJ, pipe)
        assert caught.value.errno == errno.EAGAIN


@linux
def test_a_full_disk() -> None:
    with pytest.raises(s4weights.StorageError) as caught:
        s4weights.save(OBJ, "/dev/full")
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == "/dev/full"
    with open("/dev/full", "wb", buffering=0) as file, pytest.raises(OSError) as raised:
        s4weights.save(OBJ, file)
    assert raised.value.errno == errno.ENOSPC


@linux
def test_a_disk_that_fills_up_leaves_the_old_file(path: Path) -> None:
    s4weights.save({"old": 1}, path)
    before = path.read_bytes()
    script = (
        "import resource, sys, torch, s4weights\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try: s4weights.save({'w': torch.rand(4 << 20)}, sys.argv[1])\n"
        "except s4weights.StorageError as e: print(e.errno)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True)
    assert done.stdout.strip() == str(errno.EFBIG), done.stderr
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_missing_folders_and_folders_as_targets(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        s4weights.save(OBJ, tmp_path / "none" / "a.s4w")
    assert isinstance(caught.value, s4weights.NotFoundError) and caught.value.errno == errno.ENOENT
    for action in (lambda: s4weights.save(OBJ, tmp_path), lambda: s4weights.load(tmp_path)):
        with pytest.raises(s4weights.StorageError):
            action()
    with pytest.raises(s4weights.NotFoundError) as missing:
        s4weights.load(tmp_path / "none.s4w")
    assert missing.value.filename == str(tmp_path / "none.s4w")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write")
def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    with pytest.raises(s4weights.StorageError) as caught:
        s4weights.save(OBJ, folder / "a.s4w")
    assert caught.value.errno == errno.EACCES


def test_a_folder_that_vanishes(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    def remove(done: int, total: int) -> None:
        if done == total and folder.exists():
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()

    with pytest.raises(s4weights.S4Error):
        s4weights.save(OBJ, folder / "a.s4w", progress=remove)
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_leaves_the_old_file(path: Path) -> None:
    s4weights.save({"old": 1}, path)

    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done:
            raise Stop

    for failing in (
        lambda: s4weights.save({"f": lambda: 0}, path),
        lambda: s4weights.save(OBJ, path, progress=stop),
    ):
        with pytest.raises((Stop, AttributeError, TypeError, Exception)):
            failing()
        assert s4weights.load(path) == {"old": 1} and list(path.parent.iterdir()) == [path]


def test_options(path: Path) -> None:
    for preset in ("fast", "balanced", "small"):
        for threads in (None, 1, 3):
            s4weights.save(OBJ, path, preset=preset, threads=threads, device="cpu")
            assert_identical(OBJ, s4weights.load(path, threads=threads))
            assert s4weights.inspect(path)["preset"] == preset
    s4weights.save(OBJ, path, metadata={"run": "7", "ü": "☃"})
    assert s4weights.inspect(path)["metadata"] == {"run": "7", "ü": "☃"}
    s4weights.save(OBJ, path, _use_new_zipfile_serialization=False, _disable_byteorder_record=True)
    assert_identical(OBJ, s4weights.load(path, mmap=True))
    for bad in ({"preset": "tiny"}, {"device": "tpu"}):
        with pytest.raises(ValueError, match=next(iter(bad.values()))):
            s4weights.save(OBJ, path, **bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("threads", "error", "what"),
    [
        (0, ValueError, "threads=0: expected an integer of 1 or more"),
        (-1, ValueError, "threads=-1: expected an integer of 1 or more"),
        (1 << 64, ValueError, "expected an integer of 1 or more"),
        ("2", TypeError, "threads='2': expected an integer"),
        (2.0, TypeError, "threads=2.0: expected an integer"),
        (True, TypeError, "threads=True: expected an integer"),
    ],
)
def test_threads_are_checked_alike_everywhere(
    path: Path, threads: Any, error: type[Exception], what: str
) -> None:
    from s4weights.dcp import Stager
    from s4weights.sync import Subscriber

    s4weights.save(OBJ, path)
    store = str(path.parent / "store")
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: s4weights.save(OBJ, path, threads=threads),
        "background": lambda: s4weights.save(OBJ, path, threads=threads, blocking=False),
        "load": lambda: s4weights.load(path, threads=threads),
        "load_into": lambda: s4weights.load_into({**OBJ}, path, threads=threads),
        "verify": lambda: s4weights.verify(path, threads=threads),
        "open": lambda: s4weights.open(path, threads=threads),
        "numpy.save": lambda: s4weights.numpy.save({}, path, threads=threads),
        "numpy.load": lambda: s4weights.numpy.load(path, threads=threads),
        "numpy.open": lambda: s4weights.numpy.open(path, threads=threads),
        "patch": lambda: s4weights.patch(threads=threads),
        "store": lambda: s4weights.CheckpointStore(store, threads=threads),
        "load_checkpoint": lambda: s4weights.load_checkpoint(store, threads=threads),
        "stager": lambda: Stager(threads=threads),
        "subscriber": lambda: Subscriber(store, {}, threads=threads),
        "socket": lambda: Subscriber(f"unix://{path.parent}/s", {}, threads=threads),
    }
    for name, call in calls.items():
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value).endswith(what), (name, caught.value)
    assert not Path(store).exists()


def test_reports(path: Path) -> None:
    report = s4weights.save(OBJ, path)
    assert report["bytes_in"] == 400_000 and report["bytes_out"] == path.stat().st_size
    checked = s4weights.verify(path)
    assert checked["tensors"] == 1 and checked["bytes"] == 400_000
    (tensor,) = s4weights.inspect(path)["tensors"]
    assert (tensor["name"], tensor["dtype"], tensor["shape"]) == ("weight", "float32", [100_000])


@linux
def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.s4w")
    s4weights.save(OBJ, path)
    assert os.listdir(os.fsencode(tmp_path)) == [b"\xff.s4w"]
    assert_identical(OBJ, s4weights.load(path))
    assert_identical(OBJ, s4weights.load(f"file://{path}"))
    assert s4weights.verify(path)["tensors"] == 1
    s4weights.save(OBJ, path, blocking=False).wait(60)
    with s4weights.open(path) as f:
        assert list(f) == ["weight"]
