"""The fsspec protocol ``s4w``, and DCP's own storage through it."""

from __future__ import annotations

import gc
import importlib.metadata
import io
import json
import random
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

import s4weights
from s4weights import _core
from s4weights._fsspec import S4wFileSystem, compress
from test_dcp import same, values

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def register() -> None:
    """Does what the package's entry point does, unless the wheel is installed."""
    try:
        importlib.metadata.distribution("s4weights")
    except importlib.metadata.PackageNotFoundError:
        fsspec.register_implementation("s4w", S4wFileSystem, clobber=True)


@pytest.fixture(autouse=True)
def protocol() -> None:
    register()
    assert fsspec.get_filesystem_class("s4w") is S4wFileSystem


def several() -> bytes:
    """Several files of `torch.save`, one after the other."""
    stream = io.BytesIO()
    for seed, dtype in enumerate(
        [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.complex64, torch.bool]
    ):
        made = values(seed, 3000) * 1000
        torch.save(made.to(dtype) if dtype is not torch.bool else made > 0, stream)
        torch.save({"step": seed, "small": torch.tensor(3.0)}, stream)
    shared = values(9, 4000)
    torch.save(
        {"a": shared, "b": shared[5:], "again": torch.nn.Parameter(values(8, 50, 50))}, stream
    )
    return stream.getvalue()


def test_files_come_back_byte_for_byte(tmp_path: Path) -> None:
    whole = several()
    url = f"s4w://{tmp_path}/sub/file.pt"
    fs = fsspec.filesystem("s4w")
    fs.makedirs(f"s4w://{tmp_path}/sub", exist_ok=True)
    with fs.open(url, "wb") as file:
        for at in range(0, len(whole), 1000):
            file.write(whole[at : at + 1000])
        assert file.tell() == len(whole)
    stored = (tmp_path / "sub/file.pt").read_bytes()
    assert _core.is_s4w(stored[:16]) and len(stored) < 0.8 * len(whole)
    assert s4weights.verify(tmp_path / "sub/file.pt")["chunks"] > 0
    dtypes = {t["dtype"] for t in s4weights.inspect(tmp_path / "sub/file.pt")["tensors"]}
    assert {"float32", "bfloat16", "float16", "int64", "complex64", "bool", "uint8"} <= dtypes
    with fsspec.open(url, "rb") as file:
        assert file.read() == whole
        chance = random.Random(1)
        for _ in range(60):
            first = chance.randrange(len(whole))
            size = chance.randrange(5000)
            file.seek(first)
            assert file.read(size) == whole[first : first + size] and file.tell() <= len(whole)
        file.seek(-7, io.SEEK_END)
        assert file.read() == whole[-7:] and file.read() == b""
    fs.mv(url, f"s4w://{tmp_path}/other.pt")
    assert fs.exists(f"s4w://{tmp_path}/other.pt") and not fs.exists(url)
    with fs.open(f"s4w://{tmp_path}/one.pt", "wb") as file:
        torch.save(values(0, 3000), file)
    with fs.open(f"s4w://{tmp_path}/one.pt", "rb") as file:
        assert torch.equal(torch.load(file), values(0, 3000))
    fs.rm(f"s4w://{tmp_path}/other.pt")
    assert not (tmp_path / "other.pt").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"text",
        b"PK\3\4 is no archive",
        b"PK\3\4PK\5\6" + bytes(40),
        several()[:-30],
        several()[100:],
        several()[:5000] + several(),
        several() + b"more" * 2000,
    ],
    ids=["empty", "text", "start", "both", "cut", "headless", "damaged", "longer"],
)
def test_what_is_no_file_of_torch_comes_back_too(tmp_path: Path, data: bytes) -> None:
    with fsspec.open(f"s4w://{tmp_path}/x", "wb") as file:
        file.write(data)
    with fsspec.open(f"s4w://{tmp_path}/x", "rb") as file:
        assert file.read() == data


def test_an_error_stores_nothing_and_damage_is_named(tmp_path: Path) -> None:
    fs = fsspec.filesystem("s4w")
    with pytest.raises(KeyError), fs.open(f"s4w://{tmp_path}/x", "wb") as file:
        file.write(several())
        raise KeyError
    assert not (tmp_path / "x").exists()
    with pytest.raises(ValueError, match="mode='ab'"):
        fs.open(f"s4w://{tmp_path}/x", "ab")
    stored = compress(bytearray(several()))
    assert stored is not None
    bad = bytearray(stored)
    bad[1000] ^= 1
    (tmp_path / "bad").write_bytes(bad)
    with pytest.raises(s4weights.CorruptDataError), fs.open(f"s4w://{tmp_path}/bad", "rb") as file:
        file.read()
    # A .s4w file that another program wrote is read as it is.
    s4weights.save({"w": values(1, 5000)}, tmp_path / "other")
    assert fs.cat_file(f"s4w://{tmp_path}/other") == (tmp_path / "other").read_bytes()


@pytest.mark.parametrize(
    "said",
    [
        {"version": 2, "bytes": 9, "tensors": []},
        {"version": 1, "bytes": 1 << 60, "tensors": [[0, 4000]]},
        {"version": 1, "bytes": 4000, "tensors": [[1, 4000]]},
        {"version": 1, "bytes": 4000, "tensors": [[-5, 4000]]},
        {"version": 1, "bytes": 4000, "tensors": [[0, 10]]},
        {"version": 1, "bytes": 4000, "tensors": "x"},
        [],
    ],
)
def test_places_that_lie_are_refused(tmp_path: Path, said: Any) -> None:
    stream = io.BytesIO()
    writer = _core.Writer(None, None, stream, "fast", None, {})
    memory = values(1, 1000)
    writer.write([("0", "float32", (1000,), memory.data_ptr(), 4000)], b"", None)
    writer.write([("rest", "uint8", (0,), 0, 0)], b"", None)
    writer.finish(None, {"stream": json.dumps(said).encode()}, {})
    (tmp_path / "x").write_bytes(stream.getvalue())
    with pytest.raises(s4weights.CorruptDataError):
        fsspec.open(f"s4w://{tmp_path}/x", "rb").open()


def test_dcp_finds_its_storage_by_the_protocol(tmp_path: Path) -> None:
    state = {"w": values(1, 300, 70), "half": values(2, 9000).to(torch.bfloat16), "n": {"x": [1]}}
    url = f"s4w://{tmp_path}/step-1"
    dcp.save(state, checkpoint_id=url)
    stored = (tmp_path / "step-1/__0_0.distcp").read_bytes()
    assert _core.is_s4w(stored[:16])
    loaded = {"w": torch.zeros(300, 70), "half": torch.zeros(9000).bfloat16(), "n": {"x": [0]}}
    dcp.load(loaded, checkpoint_id=url)
    assert same(loaded["w"], state["w"]) and same(loaded["half"], state["half"])
    assert loaded["n"] == state["n"]


def test_wrappers_save_without_a_pickle(tmp_path: Path) -> None:
    from s4weights.dcp import Stager, async_save, load, save

    state = {"w": values(1, 5000), "n": {"x": [1, "ü", None, 2.5], "t": (1, 2)}, "ok": True}
    entry = save(state, tmp_path / "run", 1, no_dist=True, metrics={"loss": 1.0})
    assert entry is not None and (entry.step, entry.metrics) == (1, {"loss": 1.0})
    stager = Stager()
    state["w"][3] += 1
    async_save(state, tmp_path / "run", 2, stager=stager, no_dist=True).result()
    for step in (1, 2):
        found: dict[str, Any] = {"w": torch.zeros(5000), "n": {"x": [0] * 4, "t": 0}, "ok": False}
        load(found, tmp_path / "run", step, no_dist=True)
        assert found["n"]["x"] == [1, "ü", None, 2.5] and found["ok"] is True
        assert found["n"]["t"] == (1, 2), "a tuple is no list: it is pickled"
        assert torch.equal(found["w"], state["w"]) == (step == 2)
    store = s4weights.CheckpointStore(tmp_path / "run")
    assert [e.kind for e in store.list()] == ["base", "delta"]
    shards = store.load_checkpoint(1)
    plain = [
        name for name, t in shards.items() if bytes(t.view(-1).view(torch.uint8)[:8]) == b"s4w-json"
    ]
    assert len(plain) >= 2, "JSON"
    assert same(shards["w"], values(1, 5000))


def test_files_that_begin_like_ours_come_back(tmp_path: Path) -> None:
    plain, path = tmp_path / "x.s4w", f"s4w://{tmp_path}/x.s4w"
    state = {"a": torch.arange(1000.0)}
    with fsspec.open(path, "wb") as file:
        s4weights.save(state, file)
    # As it is: s4weights reads it from both places.
    assert torch.equal(s4weights.load(plain)["a"], state["a"])
    with fsspec.open(path, "rb") as file:
        assert torch.equal(s4weights.load(file)["a"], state["a"])
    with fsspec.open(f"s4w://{tmp_path}/y.pt", "wb") as file:
        torch.save(state, file)
    compressed = (tmp_path / "y.pt").read_bytes()
    for data in (plain.read_bytes(), compressed, plain.read_bytes()[:100], compressed + b"more"):
        with fsspec.open(path, "wb") as file:
            file.write(data)
        with fsspec.open(path, "rb") as file:
            assert file.read() == data


def test_what_is_not_closed_replaces_nothing(tmp_path: Path) -> None:
    fs, path = fsspec.filesystem("s4w"), f"s4w://{tmp_path}/a.pt"
    with fs.open(path, "wb") as file:
        torch.save({"a": torch.ones(1000)}, file)
    good = fs.cat_file(path)
    file = fs.open(path, "wb")
    file.write(b"half")
    with pytest.warns(RuntimeWarning, match="not closed"):
        del file
        gc.collect()
    assert fs.cat_file(path) == good


@pytest.mark.parametrize("name", ["a.pt", "a.s4w", "a.txt"])
def test_parts_of_files_are_read(tmp_path: Path, name: str) -> None:
    fs, path = fsspec.filesystem("s4w"), f"s4w://{tmp_path}/{name}"
    with fs.open(path, "wb") as file:
        if name == "a.txt":
            file.write(bytes(range(250)))
        else:
            (torch.save if name == "a.pt" else s4weights.save)({"a": torch.zeros(9000)}, file)
    whole = fs.cat_file(path)
    assert fs.cat_file(path, 5, -10) == whole[5:-10] and fs.cat_file(path, -7) == whole[-7:]
    assert fs.read_block(path, 3, None) == whole[3:] and fs.tail(path, 9) == whole[-9:]
