"""A real run: saved, loaded, and continued to the same bits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import s4weights
from compare import assert_identical, through_torch


class Tied(torch.nn.Module):
    """Embedding and output share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(64, 16)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 32),
            torch.nn.LayerNorm(32),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(32, 16),
        )
        self.head = torch.nn.Linear(16, 64, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += tokens.numel()
        return self.head(self.layers(self.embed(tokens)))


class Run:
    """Everything that a checkpoint of a run holds."""

    def __init__(self, optimizer: str) -> None:
        self.model = Tied()
        options = {"AdamW": {"amsgrad": True}, "SGD": {"momentum": 0.9}, "Adafactor": {}}[optimizer]
        self.optimizer = getattr(torch.optim, optimizer)(
            self.model.parameters(), lr=1e-2, **options
        )
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.step = 0

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            tokens = torch.randint(0, 64, (8, 12)).roll(
                random.randrange(3) + np.random.randint(2), 0
            )
            loss = self.model(tokens).logsumexp(-1).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "step": self.step,
            "loss": float("nan"),
            "rng": {"torch": torch.get_rng_state(), "python": random.getstate()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]
        torch.set_rng_state(state["rng"]["torch"])
        random.setstate(state["rng"]["python"])


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adafactor"])
def test_a_run_goes_on_where_it_was_saved(optimizer: str, path: Path) -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    run = Run(optimizer)
    run.train(3)
    state = run.state()
    numpy_state = np.random.get_state()
    s4weights.save(state, path)
    assert s4weights.inspect(path)["form"] == "tree"
    names = [t["name"] for t in s4weights.inspect(path)["tensors"]]
    assert "model.embed.weight" in names and "model.head.weight" not in names
    expected = run.train(3)
    final = run.model.state_dict()

    loaded = s4weights.load(path)
    assert_identical(loaded, s4weights.load(path, map_location="cpu"))
    other = Run(optimizer)
    other.restore(loaded)
    np.random.set_state(numpy_state)
    assert other.train(3) == expected
    assert_identical(final, other.model.state_dict())


def test_a_whole_state_with_numpy_in_it(path: Path) -> None:
    run = Run("AdamW")
    run.train(2)
    state = {**run.state(), "numpy": np.random.get_state()}
    s4weights.save(state, path)
    assert_identical(through_torch(state), s4weights.load(path, weights_only=False))
    names = [t["name"] for t in s4weights.inspect(path)["tensors"]]
    assert {"model.embed.weight", "optimizer.state.0.exp_avg", "rng.torch"} <= set(names)
    with pytest.raises(s4weights.UnsafeLoadError) as caught:
        s4weights.load(path)
    assert caught.value.key_path == "numpy.1"
