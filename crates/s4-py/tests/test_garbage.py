"""Memory is freed with the last reference, not when the garbage collector runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from s4weights import CheckpointStore, _storages

HOLDERS = (_storages.StorageReader, _storages.StorageWriter)


@pytest.fixture(autouse=True)
def _no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def state(form: str) -> dict[str, Any]:
    shared = [1]
    plain = {"w": torch.randn(5000), "b": {"c": torch.ones(10)}}
    return plain if form == "tree" else {**plain, "x": shared, "y": shared}


def assert_free() -> None:
    held = [obj for obj in gc.get_objects() if type(obj) in HOLDERS]
    assert held == []


@pytest.mark.parametrize("form", ["tree", "pickle"])
def test_save_and_load_keep_nothing(form: str, tmp_path: Path) -> None:
    obj = state(form)
    path = tmp_path / "a.s4w"
    s4weights.save(obj, path)
    assert_free()
    saved = weakref.ref(obj["w"])
    del obj
    assert saved() is None
    loaded = s4weights.load(path)
    assert_free()
    s4weights.load_into(loaded, path)
    assert_free()
    there = weakref.ref(loaded["w"])
    del loaded
    assert there() is None


def test_a_load_of_many_tensors_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_storages, "MANY", 4)
    path = tmp_path / "a.s4w"
    s4weights.save({str(i): torch.randn(5000) for i in range(20)}, path)
    loaded = s4weights.load(path)
    assert_free()
    there = weakref.ref(loaded["7"])
    del loaded
    assert there() is None


@pytest.mark.parametrize("form", ["tree", "pickle"])
def test_stores_keep_nothing(form: str, tmp_path: Path) -> None:
    with CheckpointStore(tmp_path / "s") as store:
        store.save_checkpoint(state(form), 1)
        assert_free()
        store.save_checkpoint(state(form), 2, blocking=False).wait()
        store.load_checkpoint()
    assert_free()
