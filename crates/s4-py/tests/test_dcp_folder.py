"""DCP's folders are converted as PyTorch would convert them, but no code in them runs."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import s4weights
from s4weights import _dcp_folder
from s4weights._dcp_folder import load_folder
from test_dcp import run_ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="PyTorch without distributed")


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(64, 512, generator=generator)
    return {
        "model": {
            "w": weights,
            "tied": weights,
            "strided": weights.t()[3:9, ::2],
            "half": torch.nn.Parameter(weights[:3].bfloat16()),
            "scalar": torch.tensor(-0.0),
            "empty": torch.empty(0, 3, dtype=torch.int64),
            "nan": torch.tensor([float("nan"), float("inf"), 1e-45]),
        },
        "optim": {"state": {0: {"m": torch.ones(2)}, 1: {"m": torch.zeros(2)}}},
        "groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": torch.tensor(0.2)}],
        "step": 5,
        "none": None,
        "betas": (0.9, 0.95),
    }


def save(folder: Path, state: dict[str, Any], **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True, **options)
    return folder


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        same_values = torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        return a.dtype == b.dtype and a.shape == b.shape and same_values
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def as_pytorch_does(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(folder, folder.parent / "whole.pt")
    return torch.load(folder.parent / "whole.pt", weights_only=False)


def test_a_folder_is_what_pytorch_makes_of_it(tmp_path: Path) -> None:
    folder = save(tmp_path / "step-1.5", state())
    wanted = as_pytorch_does(folder)
    assert same(load_folder(folder), wanted)
    command = [sys.executable, "-m", "s4weights", "compress", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "tensors" in done.stdout, done.stderr
    loaded = s4weights.load(tmp_path / "step-1.5.s4w")
    assert same(loaded, wanted)
    assert loaded["model"]["w"][0, 0] == state()["model"]["w"][0, 0]


def test_several_files_of_a_rank_are_read(tmp_path: Path) -> None:
    writer = dcp.FileSystemWriter(tmp_path / "many", single_file_per_rank=False, thread_count=2)
    save(tmp_path / "many", state(), storage_writer=writer)
    assert len(list((tmp_path / "many").glob("*.distcp"))) > 5
    assert same(load_folder(tmp_path / "many"), as_pytorch_does(tmp_path / "many"))


def test_empty_containers_leave_a_gap(tmp_path: Path) -> None:
    # PyTorch saves nothing for empty containers, and then cannot load the list at all.
    folder = save(tmp_path / "a", {"l": [torch.ones(1), {}, {"x": 2}], "d": {}})
    assert same(load_folder(folder), {"l": [torch.ones(1), None, {"x": 2}]})


def _save_sharded(rank: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    values = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)
    shards = {"rows": [Shard(0)], "columns": [Shard(1)], "copies": [Replicate()]}
    tensors = {name: distribute_tensor(values, mesh, how) for name, how in shards.items()}
    # Of a single row, the second rank has nothing.
    tensors["short"] = distribute_tensor(values[:1], mesh, [Shard(0)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": tensors, "rank": {str(rank): rank}}, checkpoint_id=folder)


def test_shards_of_ranks_become_tensors(tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    run_ranks(2, _save_sharded, str(folder))
    values = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)
    found = load_folder(folder)
    assert same(found, as_pytorch_does(folder))
    assert {name: tuple(t.shape) for name, t in found["model"].items()} == {
        **dict.fromkeys(("rows", "columns", "copies"), (7, 6)),
        "short": (1, 6),
    }
    assert all(torch.equal(found["model"][n], values) for n in ("rows", "columns", "copies"))
    assert found["rank"] == {"0": 0, "1": 1}


def test_a_folder_that_is_not_complete_is_not_found(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", {"w": torch.ones(3)})
    (folder / ".metadata").rename(folder / ".metadata.tmp")
    with pytest.raises(s4weights.NotFoundError, match=r"no \.metadata"):
        load_folder(folder)
    command = [sys.executable, "-m", "s4weights", "compress", str(folder), str(tmp_path / "o.s4w")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 3 and "no .metadata" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


class Reducer:
    """Calls the given function when it is unpickled."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.what = call, arguments

    def __reduce__(self) -> Any:
        return self.what


def read_metadata(folder: Path) -> Metadata:
    with open(folder / ".metadata", "rb") as file:
        found = pickle.load(file)
    assert isinstance(found, Metadata)
    return found


def write_metadata(folder: Path, metadata: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_nothing_that_is_pickled_runs(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    for number, place in enumerate(["metadata", "planner_data", "storage_meta", "version"]):
        folder = save(tmp_path / f"m{number}", {"w": torch.ones(3)})
        metadata: Any = read_metadata(folder)
        if place == "metadata":
            metadata = Evil(mark)
        else:
            setattr(metadata, place, Evil(mark))
        write_metadata(folder, metadata)
        with pytest.raises(s4weights.UnsafeLoadError, match=r"touch|getattr") as raised:
            load_folder(folder)
        assert raised.value.key_path == ".metadata" and raised.value.global_name
    # An item that is no tensor.
    folder = save(tmp_path / "item", {"w": torch.ones(3), "config": Evil(mark)})
    mark.unlink(missing_ok=True)
    with pytest.raises(s4weights.UnsafeLoadError, match="'config'") as raised:
        load_folder(folder)
    assert raised.value.key_path == "config"
    command = [sys.executable, "-m", "s4weights", "compress", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 4 and "config" in done.stderr, done
    assert not mark.exists()
    assert not (tmp_path / "item.s4w").exists()


@pytest.mark.parametrize(
    "call",
    [
        (os.system, "touch"),
        (eval, "1"),
        (getattr, str, "join"),
        (torch.load, "x"),
        (torch.ones, 3),
        (torch.Tensor, 3),
        (pickle.loads, b"N."),
        (io.open, "/dev/null"),
    ],
    ids=lambda call: str(call[0]),
)
def test_metadata_call_nothing(tmp_path: Path, call: Any) -> None:
    write_metadata(tmp_path, Reducer(*call))
    with pytest.raises(s4weights.UnsafeLoadError):
        load_folder(tmp_path)


def test_stand_ins_cannot_be_changed(tmp_path: Path) -> None:
    # BUILD on a class would change it for every later load.
    for state in (b"}", b"N}\x8c\x01aK\x01s\x86"):
        name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
        (tmp_path / ".metadata").write_bytes(b"\x80\x04" + name + state + b"b.")
        with pytest.raises(s4weights.CorruptDataError):
            load_folder(tmp_path)
    assert not hasattr(_dcp_folder.Metadata, "a")


def test_a_memo_takes_no_more_memory_than_it_holds(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x02Nr\xff\xff\xff\x7f.")
    with pytest.raises(s4weights.CorruptDataError, match="no metadata"):
        load_folder(tmp_path)


def info_of(metadata: Metadata, fqn: str = "w") -> Any:
    return next(i for index, i in metadata.storage_data.items() if index.fqn == fqn)


def _path(name: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        info_of(metadata).relative_path = name

    return change


def _info(**members: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        vars(info_of(metadata)).update(members)

    return change


def _entry(size: Any, chunks: Any, dtype: Any = torch.float32) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        found = info_of(metadata)
        properties = TensorProperties(dtype=dtype)
        pieces = [ChunkStorageMetadata(offsets=o, sizes=s) for o, s in chunks]
        metadata.state_dict_metadata["w"] = TensorStorageMetadata(properties, size, pieces)
        places = {i: p for i, p in metadata.storage_data.items() if i.fqn != "w"}
        for number, (offsets, _) in enumerate(chunks):
            share = copy.copy(found)
            share.length = found.length // len(chunks)
            share.offset = found.offset + number * share.length
            places[MetadataIndex("w", offsets)] = share
        metadata.storage_data = places

    return change


def _set(**members: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        vars(metadata).update(members)

    return change


def _planner(**paths: Any) -> Callable[[Metadata], None]:
    return lambda metadata: metadata.planner_data.update(paths)


def _more(name: str, value: Any) -> Callable[[Metadata], None]:
    return lambda metadata: metadata.state_dict_metadata.update({name: value})


CONTRADICTIONS: dict[str, tuple[Callable[[Metadata], None], str]] = {
    "a path above": (_path("../outside"), "is not a file in the folder"),
    "an absolute path": (_path("/etc/passwd"), "is not a file in the folder"),
    "a path below": (_path("sub/x.distcp"), "is not a file in the folder"),
    "the folder itself": (_path("."), "is not a file in the folder"),
    "a nul": (_path("a\0b"), "is not a file in the folder"),
    "no text": (_path(7), "is not a file in the folder"),
    "a link": (_path("link"), "not a regular file"),
    "no such file": (_path("gone.distcp"), "missing"),
    "a length beyond the file": (_info(length=1 << 40), "lies outside the file"),
    "an offset beyond the file": (_info(offset=1 << 62), "lies outside the file"),
    "a negative offset": (_info(offset=-1), "invalid numbers for"),
    "a broken length": (_info(length=3), "smaller than its values"),
    "another place": (_info(offset=1), "overlaps another one|'w'"),
    "another shape": (_entry((4, 2), [((0, 0), (4, 2))]), "in the metadata"),
    "another dtype": (_entry((2, 4), [((0, 0), (2, 4))], torch.int32), "in the metadata"),
    "a huge tensor": (_entry((1 << 40, 4), [((0, 0), (1 << 40, 4))]), "smaller than its values"),
    "a piece missing": (_entry((4, 4), [((0, 0), (2, 4))]), "leave gaps"),
    "pieces that overlap": (_entry((3, 4), [((0, 0), (2, 4)), ((1, 0), (2, 4))]), "overlap"),
    "a piece outside": (_entry((2, 4), [((1, 0), (2, 4))]), "a piece of"),
    "a piece of other dimensions": (_entry((2, 4), [((0,), (8,))]), "a piece of"),
    "no pieces": (_entry((2, 4), []), "leave gaps"),
    "a negative size": (_entry((-2, 4), [((0, 0), (-2, 4))]), "invalid numbers for"),
    "a size that is none": (_entry("24", []), "no shape"),
    "a dtype that is none": (_entry((2, 4), [((0, 0), (2, 4))], 5), "no dtype"),
    "an entry without a piece": (_more("x", BytesStorageMetadata()), "'x' has no piece"),
    "an entry of another kind": (_more("x", 5), "neither a tensor nor bytes"),
    "bytes for a tensor": (_more("w", BytesStorageMetadata()), "'w' has no piece"),
    "no entries": (_set(state_dict_metadata=None), "no names"),
    "no places": (_set(storage_data=None), "no list of pieces"),
    "a path through a value": (_planner(step=("w", "x")), "through a value|occurs twice"),
    "a place that is taken": (_planner(step=("w",)), "occurs twice"),
    "a list of a trillion": (_planner(step=("a", 10**12)), "invalid list indices: "),
    "an endless path": (_planner(step=("a",) * 1000), "a path of 1000"),
    "an empty path": (_planner(step=()), "a path of 0"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_are_damage(tmp_path: Path, case: str) -> None:
    change, said = CONTRADICTIONS[case]
    (tmp_path / "outside").write_bytes(b"secret")
    folder = save(tmp_path / "a", {"w": torch.ones(2, 4), "step": 5})
    (folder / "link").symlink_to(next(folder.glob("*.distcp")))
    metadata = read_metadata(folder)
    change(metadata)
    write_metadata(folder, metadata)
    with pytest.raises(s4weights.CorruptDataError, match=said) as raised:
        load_folder(folder)
    assert str(folder) in str(raised.value)


def test_what_others_wrote_is_not_supported(tmp_path: Path) -> None:
    for number, change in enumerate(
        [
            _info(transform_descriptors=["zstd/1"]),
            _set(planner_data=[1]),
            _planner(step=(1.5,)),
            _set(storage_data={"w": 1}),
        ]
    ):
        folder = save(tmp_path / str(number), {"w": torch.ones(2, 4), "step": 5})
        metadata = read_metadata(folder)
        change(metadata)
        write_metadata(folder, metadata)
        with pytest.raises(s4weights.UnsupportedFormatError, match=str(folder)):
            load_folder(folder)


def test_metadata_that_are_cut_or_changed_raise_what_is_documented(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", {"w": torch.ones(2, 4), "l": [torch.ones(1)], "step": 5})
    text = (folder / ".metadata").read_bytes()
    generator = torch.Generator().manual_seed(7)
    changed = [text[:n] for n in range(0, len(text), 7)]
    for at in torch.randint(len(text), (400,), generator=generator).tolist():
        changed.append(text[:at] + bytes([text[at] ^ (1 << (at % 8))]) + text[at + 1 :])
    refused = 0
    for bad in changed:
        (folder / ".metadata").write_bytes(bad)
        try:
            load_folder(folder)
        except s4weights.S4Error:
            refused += 1
    assert refused > len(changed) // 2


def test_a_folder_saved_through_s4w_is_named_as_such(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    dcp.save({"w": torch.randn(300, 300), "step": 5}, checkpoint_id=f"s4w://{folder}", no_dist=True)
    with pytest.raises(s4weights.UnsupportedFormatError, match="saved through s4w://"):
        load_folder(folder)


def test_pieces_that_are_damaged_raise_what_is_documented(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", {"w": torch.ones(2, 4), "step": 5})
    (file,) = folder.glob("*.distcp")
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(s4weights.CorruptDataError, match="lies outside the file"):
        load_folder(folder)
    file.write_bytes(bytes(len(whole)))
    with pytest.raises(s4weights.S4Error, match=r"'w'|'step'"):
        load_folder(folder)
