"""torchao's 8-bit optimizers, whose state wraps codes and scales: saved by DCP, killed, resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness import die
from test_dcp import run_ranks

pytest.importorskip("torchao", reason="needs torchao")

from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW8bit

import s4weights.dcp

STEPS = 4


class Run:
    """A model whose optimizer keeps 8 bits of each moment."""

    def __init__(self, sharded: bool = False) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.Linear(256, 128))
        if sharded:
            fully_shard(self.model)
        self.optimizer = AdamW8bit(self.model.parameters(), lr=1e-2)
        self.done = 0

    def train(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            generator = torch.Generator().manual_seed(self.done)
            loss = self.model(torch.randn(8, 128, generator=generator)).square().mean()
            loss.backward()
            # Otherwise torchao compiles its steps, which takes a minute.
            with torch.compiler.set_stance("force_eager"):
                self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "done": self.done}

    def save(self, place: str, **options: Any) -> None:
        s4weights.dcp.save(self.state(), place, self.done, **options)

    def resume(self, place: str, **options: Any) -> None:
        # So that the optimizer has a state to load into.
        self.train(1)
        state = self.state()
        s4weights.dcp.load(state, place, **options)
        self.take(state)

    def take(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.done = state["done"]


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a tensor is made of."""
    if isinstance(tensor, DTensor):
        return parts(tensor._local_tensor)
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [p for name in names for p in parts(getattr(tensor, name))]
    return [tensor.detach()]


def assert_equal(a: Run, b: Run) -> None:
    """The model and the optimizer's state are the same bit by bit."""
    kinds = set()
    for x, y in zip(a.model.parameters(), b.model.parameters(), strict=True):
        values = [[x, *run.optimizer.state[p].values()] for run, p in ((a, x), (b, y))]
        values[1][0] = y
        for one, other in zip(*values, strict=True):
            kinds.add(len(parts(one)))
            for p, q in zip(parts(one), parts(other), strict=True):
                differ = (p != q).nonzero()
                assert torch.equal(p, q), (a.done, tuple(p.shape), p.dtype, len(differ), differ[:5])
    # Some tensors are wrapped.
    assert max(kinds) > 1


def victim(place: str, name: str) -> None:
    run = Run()
    run.train(2)
    run.save(place, no_dist=True)
    torch.save(run.state(), f"{place}.pt")
    run.train(3)
    die()


VICTIMS = [(victim, "run")]


def test_what_was_killed_resumes_to_the_bit(killed: Path) -> None:
    place = str(killed / __name__ / "run")
    # As `torch.save` kept it in the same process: in another one, PyTorch's matrix products may be
    # rounded in another way.
    whole = Run()
    whole.train(1)
    whole.take(torch.load(f"{place}.pt", weights_only=False))
    resumed = Run()
    resumed.resume(place, no_dist=True)
    assert resumed.done == whole.done == 2
    assert_equal(whole, resumed)
    # Its weights equal those of a run that nobody killed, except for rounding: a step changes weights by 5e-3.
    unbroken = Run()
    unbroken.train(2)
    for x, y in zip(unbroken.model.parameters(), resumed.model.parameters(), strict=True):
        assert float((x - y).abs().mean()) < 1e-4
    whole.train(STEPS)
    resumed.train(STEPS)
    assert_equal(whole, resumed)


def _ranks(rank: int, place: str) -> None:
    whole = Run(sharded=True)
    whole.train(2)
    whole.save(place)
    whole.train(STEPS)
    resumed = Run(sharded=True)
    resumed.resume(place)
    resumed.train(STEPS)
    assert_equal(whole, resumed)


def test_shards_of_two_ranks_resume_to_the_bit(tmp_path: Path) -> None:
    run_ranks(2, _ranks, str(tmp_path))
