"""Distributed checkpoints that the command ``s4w`` puts together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_cli import main, run
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import s4weights
import s4weights.dcp
from s4weights import _core
from s4weights._cli_dcp import put_together
from test_dcp import run_ranks


def distributed() -> dict[str, Any]:
    """A state that the planner stores in every way that it knows."""
    return {
        "model": {"w": torch.arange(12.0).reshape(3, 4).bfloat16(), "scalar": torch.tensor(7)},
        "optim": {"groups": [{"lr": 0.5, "params": [0, 1]}], "empty": torch.zeros(0, 3)},
        "step": 5,
        "betas": (0.9, torch.ones(2)),
        "text": "é\x1b",
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def as_pytorch_does(state_dict: dict[str, Any], folder: Path) -> Any:
    dcp.save(state_dict, checkpoint_id=folder, no_dist=True)
    dcp_to_torch_save(folder, folder / "whole.pt")
    return torch.load(folder / "whole.pt", weights_only=False)


@pytest.mark.parametrize("planner", [s4weights.dcp.SavePlanner, dcp.DefaultSavePlanner])
def test_a_distributed_checkpoint_is_put_together(tmp_path: Path, planner: Any) -> None:
    url = str(tmp_path / "store")
    s4weights.dcp.save(distributed(), url, 5, planner=planner(), no_dist=True)
    target = tmp_path / "c.pt"
    code, said = main("store", "restore", url, "latest", str(target))
    assert code == 0, said
    found = torch.load(target, weights_only=True)
    assert same(found, as_pytorch_does(distributed(), tmp_path / "folder"))
    assert found["step"] == 5 and torch.equal(found["model"]["w"], distributed()["model"]["w"])
    # The same by way of a .s4w file, whose default output is a .pt file, too.
    assert run("store", "restore", url, "5", str(tmp_path / "d.s4w")).returncode == 0
    assert main("decompress", str(tmp_path / "d.s4w"))[0] == 0
    assert same(torch.load(tmp_path / "d.pt"), found)
    # A file for tensors alone gets the pieces, with a warning.
    out = run("store", "restore", url, "5", str(tmp_path / "e.safetensors"))
    assert out.returncode == 0 and "pieces" in out.stderr, out.stderr


def save_shards(rank: int, url: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    values = torch.arange(42, dtype=torch.float32).reshape(7, 6)
    shards = {"rows": [Shard(0)], "columns": [Shard(1)], "copies": [Replicate()]}
    tensors = {name: distribute_tensor(values, mesh, how) for name, how in shards.items()}
    # Of a single row, the second rank has nothing.
    tensors["short"] = distribute_tensor(values[:1], mesh, [Shard(0)])
    s4weights.dcp.save({"model": tensors, "rank": {str(rank): rank}}, url, 1)

    dcp.save(
        {"w": torch.ones(rank + 1)},
        storage_writer=s4weights.dcp.StorageWriter(url, step=2),
        use_collectives=False,
    )


def test_shards_of_ranks_become_tensors(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    run_ranks(2, save_shards, url)
    target = tmp_path / "c.pt"
    code, said = main("store", "restore", url, "1", str(target))
    assert code == 0, said
    found = torch.load(target)
    values = torch.arange(42, dtype=torch.float32).reshape(7, 6)
    assert all(torch.equal(found["model"][n], values) for n in ("rows", "columns", "copies"))
    assert torch.equal(found["model"]["short"], values[:1])
    assert found["rank"] == {"0": 0, "1": 1}
    # What each rank saved on its own is not one state.
    code, said = main("store", "restore", url, "2", str(target), "-f")
    assert code == 4 and "each rank" in said, said


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


def test_a_distributed_checkpoint_runs_no_code(tmp_path: Path) -> None:
    url, mark = str(tmp_path / "store"), tmp_path / "executed"
    s4weights.dcp.save({"w": torch.ones(3), "config": Evil(mark)}, url, 1, no_dist=True)
    mark.unlink(missing_ok=True)
    code, said = main("store", "restore", url, "1", str(tmp_path / "c.pt"))
    assert code == 4 and "config" in said, said
    assert not mark.exists() and not (tmp_path / "c.pt").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["state"]["w"].update(size=[5]),
        lambda d: d["state"]["w"].update(dtype="float64"),
        lambda d: d["state"]["w"].update(chunks=[]),
        lambda d: d["state"]["w"].update(size=[1 << 60], chunks=[[[0], [1 << 60]]]),
        lambda d: d["pieces"].pop(0),
        lambda d: d["pieces"][0].__setitem__(3, "other"),
        lambda d: d["planner"].update(w=[]),
        lambda d: d["planner"].update(w=["step", "w"]),
        lambda d: d["state"].update(w={"kind": "bytes"}),
    ],
)
def test_pieces_that_contradict_the_metadata_are_damage(tmp_path: Path, change: Any) -> None:
    url, file = str(tmp_path / "store"), str(tmp_path / "d.s4w")
    s4weights.dcp.save({"w": torch.ones(3), "step": 1}, url, 1, no_dist=True)
    assert run("store", "restore", url, "1", file).returncode == 0
    reader = _core.Reader(file, None, None, None, {})
    metadata = json.loads(reader.blob("dcp"))
    metadata["pieces"].sort(key=lambda piece: piece[0] != "w")
    change(metadata)

    class Changed:
        """The reader of a file with other metadata."""

        def __getattr__(self, name: str) -> Any:
            return getattr(reader, name)

        def blob(self, name: str) -> bytes:
            return json.dumps(metadata).encode()

    with pytest.raises(s4weights.CorruptDataError, match=r"here: "):
        put_together(Changed(), "here")  # type: ignore[arg-type]
