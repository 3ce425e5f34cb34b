"""Megatron-Core's dist_checkpointing on CPU ranks: saved, killed, resumed, resharded. Run by
``cargo xtask test --adapters`` if Megatron-Core has a wheel for this Python (3.12).
"""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from compare import assert_identical
from harness import die, run_guide, run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="needs megatron-core"
)

STEPS = 5


def start() -> tuple[int, int]:
    torch.distributed.init_process_group("gloo")
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


class Run:
    """A matrix split by rows, with its moments, and a bias that every rank has."""

    def __init__(self) -> None:
        self.rank, self.world = start()
        made = torch.Generator().manual_seed(1)
        whole = torch.randn(8, 30, generator=made)
        self.w = torch.nn.Parameter(whole.chunk(self.world)[self.rank].clone())
        self.bias = torch.nn.Parameter(torch.zeros(30))
        self.optimizer = torch.optim.AdamW([self.w, self.bias], lr=1e-2)
        self.done = 0
        for parameter in (self.w, self.bias):
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()

    def step(self) -> None:
        made = torch.Generator().manual_seed(self.done)
        target = torch.randn(8, 30, generator=made).chunk(self.world)[self.rank]
        self.optimizer.zero_grad()
        (self.w + 0 * self.bias - target).square().sum().backward()
        self.bias.grad = target.new_full((30,), float(self.done))
        self.optimizer.step()
        self.done += 1

    def sharded(self) -> dict[str, Any]:
        from megatron.core.dist_checkpointing import ShardedTensor
        from megatron.core.dist_checkpointing.mapping import ShardedObject

        def rows(name: str, tensor: torch.Tensor) -> Any:
            return ShardedTensor.from_rank_offsets(name, tensor, (0, self.rank, self.world))

        def same(name: str, tensor: torch.Tensor) -> Any:
            return ShardedTensor.from_rank_offsets(name, tensor, replica_id=self.rank)

        w, bias = (self.optimizer.state[p] for p in (self.w, self.bias))
        return {
            "w": rows("w", self.w.data),
            "w.m": rows("w.m", w["exp_avg"]),
            "w.v": rows("w.v", w["exp_avg_sq"]),
            "bias": same("bias", self.bias.data),
            "bias.m": same("bias.m", bias["exp_avg"]),
            "bias.v": same("bias.v", bias["exp_avg_sq"]),
            "object": ShardedObject("object", {"n": 5}, (1,), (0,), replica_id=self.rank),
            "step": self.done,
            "updates": [w["step"], bias["step"]],
        }

    def restore(self, state: dict[str, Any]) -> None:
        w, bias = (self.optimizer.state[p] for p in (self.w, self.bias))
        self.w.data.copy_(state["w"])
        self.bias.data.copy_(state["bias"])
        for moments, name in ((w, "w"), (bias, "bias")):
            moments["exp_avg"].copy_(state[f"{name}.m"])
            moments["exp_avg_sq"].copy_(state[f"{name}.v"])
        w["step"], bias["step"] = state["updates"]
        self.done = state["step"]


def folders(folder: str) -> list[Path]:
    found = Path(folder).glob("iter_*/metadata.json")
    return sorted(path.parent for path in found)


def train(folder: str, how: str, die_at: str) -> None:
    from megatron.core import dist_checkpointing

    from s4weights.adapters.megatron import LoadStrategy, SaveStrategy

    run = Run()
    store = f"{folder}/store"
    if folders(folder):
        last = folders(folder)[-1]
        strategy = LoadStrategy(store)
        run.restore(dist_checkpointing.load(run.sharded(), str(last), strategy))
        assert run.done == int(last.name[5:])
    strategy = SaveStrategy(store)
    while run.done < STEPS:
        run.step()
        target = Path(folder, f"iter_{run.done:07}")
        if run.rank == 0:
            target.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        if run.done == int(die_at) and run.rank == run.world - 1:
            die()
        later = dist_checkpointing.save(
            run.sharded(), str(target), strategy, async_sharded_save=how == "async"
        )
        if later is not None:
            later.execute_sync()
    torch.distributed.destroy_process_group()


def guide(folder: str) -> None:
    import os

    os.chdir(folder)
    run = Run()
    run.step()
    names = run_guide("megatron.md", {"sharded": run.sharded, "folder": "out/iter_0000001"})
    assert_identical(names["state"]["w"], run.w.data)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_killed_run_resumes_to_the_same_bits(how: str, tmp_path: Path) -> None:
    killed, whole = str(tmp_path / "killed"), str(tmp_path / "whole")
    codes = run_ranks(2, "test_megatron", "train", killed, how, "4")
    assert codes[1] == -signal.SIGKILL and codes[0] != 0
    assert [path.name for path in folders(killed)][-1] == "iter_0000003"
    # Resumed on another number of ranks.
    assert run_ranks(1, "test_megatron", "train", killed, how, "0") == [0]
    assert run_ranks(2, "test_megatron", "train", whole, how, "0") == [0, 0]
    ours, theirs = (s4weights.load_checkpoint(f"{path}/store", STEPS) for path in (killed, whole))
    for name in ("bias", "bias.m", "bias.v"):
        assert_identical(ours[name], theirs[name])
    for name in ("w", "w.m", "w.v"):
        halves = torch.cat([theirs[f"{name}@0,0"], theirs[f"{name}@4,0"]])
        assert_identical(ours[name].clone(), halves)
    kinds = {entry.kind for entry in s4weights.CheckpointStore(f"{whole}/store").list()}
    assert "base" in kinds


def test_the_guide(tmp_path: Path) -> None:
    assert run_ranks(1, "test_megatron", "guide", str(tmp_path)) == [0]
