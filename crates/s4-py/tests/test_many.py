"""Loads of many tensors: some are read while others are being created."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from compare import assert_identical
from s4weights import _storages


@pytest.fixture(autouse=True)
def _few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_storages, "MANY", 16)


def state() -> dict[str, Any]:
    """Weights, whose values are the rounded masters', come first."""
    generator = torch.Generator().manual_seed(1)
    masters = [torch.randn(70, 70, generator=generator) for _ in range(60)]
    out: dict[str, Any] = {f"w{i}": master.bfloat16() for i, master in enumerate(masters)}
    out |= {f"m{i}": master for i, master in enumerate(masters)}
    out |= {f"v{i}": master.square().requires_grad_() for i, master in enumerate(masters)}
    shared = torch.randn(2, 5000, generator=generator)
    return {**out, "row": shared[1], "both": shared, "empty": torch.empty(0), "one": torch.tensor(1)}


def readers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("s4weights-read")]


@pytest.fixture
def threads_of_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that batches are read on."""
    names: list[str] = []
    original = _storages.read_batch

    def read_batch(*args: Any, **options: Any) -> None:
        names.append(threading.current_thread().name)
        original(*args, **options)

    monkeypatch.setattr(_storages, "read_batch", read_batch)
    return names


@pytest.mark.parametrize("preset", ["fast", "balanced"])
def test_some_are_read_while_others_are_created(
    preset: Any, threads_of_reads: list[str], tmp_path: Path
) -> None:
    obj = state()
    s4weights.save(obj, tmp_path / "a", preset=preset)
    assert_identical(s4weights.load(tmp_path / "a"), obj)
    # Tensors predicted from others are read at the end, on this thread.
    assert threads_of_reads[-1] == threading.current_thread().name
    assert len(threads_of_reads) > 3
    assert all(name.startswith("s4weights-read") for name in threads_of_reads[:-1])
    assert not readers()


def test_a_progress_function_is_called_on_the_callers_thread(
    threads_of_reads: list[str], tmp_path: Path
) -> None:
    obj = state()
    s4weights.save(obj, tmp_path / "a")
    callers = set()
    note = lambda _done, _total: callers.add(threading.current_thread())  # noqa: E731
    assert_identical(s4weights.load(tmp_path / "a", progress=note), obj)
    assert callers == {threading.current_thread()}
    assert set(threads_of_reads) == {threading.current_thread().name}


def test_damage_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "a"
    s4weights.save(state(), path, preset="fast")
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 3] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(s4weights.CorruptDataError, match=r"`[mvw]\d+`"):
        s4weights.load(path)
    assert not readers()


def test_reading_stops_with_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, threads_of_reads: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "a"
    s4weights.save(state(), path)
    original = _storages.StorageReader.new_tensor

    def new_tensor(self: Any, number: int, *args: Any) -> Any:
        if number == 170:
            end = time.monotonic() + 120
            while not threads_of_reads and time.monotonic() < end:
                time.sleep(0.001)
            raise KeyboardInterrupt
        return original(self, number, *args)

    monkeypatch.setattr(_storages.StorageReader, "new_tensor", new_tensor)
    with pytest.raises(KeyboardInterrupt):
        s4weights.load(path)
    assert threads_of_reads
    assert not readers()
