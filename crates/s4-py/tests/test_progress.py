"""What a progress function raises cancels a save until it takes effect, and never after that."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
import s4weights.numpy
from s4weights import CheckpointStore

STATES: tuple[dict[str, Any], ...] = (
    {"a": 1},
    {"w": torch.ones(50_000)},
    {"w": torch.zeros(0)},
)


class Refusing:
    """Raises in its n-th call."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def __call__(self, done: int, total: int) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise ZeroDivisionError


def outcomes(save: Callable[[Refusing], object], done: Callable[[], bool]) -> None:
    """A save that raises has no effect, and one that returns has."""
    for at in range(1, 20):
        refusing = Refusing(at)
        try:
            save(refusing)
        except ZeroDivisionError:
            assert not done(), at
        else:
            assert done(), at
        if refusing.calls < at:
            return
    raise AssertionError("no end")


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("state", STATES, ids=["no tensors", "a tensor", "an empty tensor"])
def test_a_checkpoint(
    tmp_path: Path, state: dict[str, Any], blocking: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    with CheckpointStore(tmp_path) as store:
        seen = 0

        def save(refusing: Refusing) -> None:
            nonlocal seen
            seen = len(store.list())
            if blocking:
                store.save_checkpoint(state, 1, progress=refusing)
            else:
                store.save_checkpoint(state, 1, progress=refusing, blocking=False).wait(120)

        outcomes(save, lambda: len(store.list()) == seen + 1)


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("state", STATES, ids=["no tensors", "a tensor", "an empty tensor"])
def test_a_file(tmp_path: Path, state: dict[str, Any], blocking: bool) -> None:
    path = tmp_path / "a"

    def save(refusing: Refusing) -> None:
        path.unlink(missing_ok=True)
        if blocking:
            s4weights.save(state, path, progress=refusing)
        else:
            s4weights.save(state, path, progress=refusing, blocking=False).wait(120)

    outcomes(save, path.exists)


def test_a_file_of_arrays(tmp_path: Path) -> None:
    path = tmp_path / "a"

    def save(refusing: Refusing) -> None:
        path.unlink(missing_ok=True)
        s4weights.numpy.save({"w": torch.ones(50_000).numpy()}, path, progress=refusing)

    outcomes(save, path.exists)
