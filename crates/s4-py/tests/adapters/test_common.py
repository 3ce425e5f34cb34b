"""Tests of the functions that several adapters share."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from s4weights.adapters._common import load_found, step_in


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-500", 500),
        ("runs/checkpoint-500/", 500),
        ("epoch=1-step=20.ckpt", 20),
        ("step-300.s4w", 300),
        ("step-300.pt2", 300),
        ("step-300.pt.s4w", 300),
        ("run.7", 7),
        ("step-8-final", 8),
    ],
)
def test_the_step_in_a_name(name: str, step: int) -> None:
    assert step_in(name) == step


def test_an_extension_is_no_step() -> None:
    with pytest.raises(ValueError, match="ends with the training step"):
        step_in("last.s4w")


def test_the_newest_of_a_store(tmp_path: Path) -> None:
    store = s4weights.CheckpointStore(tmp_path)
    assert load_found(store, None) is None
    for step in (1, 2):
        store.save_checkpoint({"step": step}, step, blocking=False)
    assert load_found(store, None) == (2, {"step": 2})
    assert load_found(store, 1) == (1, {"step": 1})
    with pytest.raises(s4weights.NotFoundError):
        load_found(store, 3)


@pytest.mark.parametrize("step", [None, 2])
@pytest.mark.parametrize("name", ["{}", "file://{}", "{}/../link"])
def test_what_another_store_of_the_same_place_saves_is_waited_for(
    name: str, step: int | None, tmp_path: Path
) -> None:
    folder, seen = tmp_path / "store", threading.Event()
    (tmp_path / "link").symlink_to(folder)
    store = s4weights.CheckpointStore(folder)
    store.save_checkpoint({"w": torch.zeros(500, 500)}, 1)

    def progress(done: int, total: int) -> None:
        if done and not seen.is_set():
            seen.set()
            time.sleep(0.5)

    store.save_checkpoint({"w": torch.randn(500, 500)}, 2, blocking=False, progress=progress)
    assert seen.wait(60)
    found = load_found(s4weights.CheckpointStore(name.format(folder)), step)
    assert found is not None and found[0] == 2


def test_an_error_of_another_store_is_left_to_its_user(tmp_path: Path) -> None:
    store = s4weights.CheckpointStore(tmp_path)
    store.save_checkpoint({"w": torch.zeros(500, 500)}, 1)

    def fail(done: int, total: int) -> None:
        if done:
            raise OSError("no more")

    store.save_checkpoint({"w": torch.randn(500, 500)}, 2, blocking=False, progress=fail)
    found = load_found(s4weights.CheckpointStore(tmp_path), None)
    assert found is not None and found[0] == 1
    with pytest.raises(OSError, match="no more"):
        store.close()


def test_the_newest_of_a_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = s4weights.CheckpointStore(tmp_path / "store", runner="unix:///nobody")
    # The store lags behind; a checkpoint is on the runner's drive.
    s4weights.CheckpointStore(tmp_path / "store").save_checkpoint({"w": torch.ones(3)}, 1)
    file, requests = tmp_path / "restored.s4w", []

    def answer(method: str, path: str, message: Any = None) -> dict[str, Any]:
        requests.append({key: message[key] for key in ("id", "step") if key in message})
        step = message.get("step", 2)
        s4weights.save({"w": torch.ones(3) * step}, file)
        return {"step": step, "path": str(file), "tier": "staged", "skipped": ["a damaged one"]}

    monkeypatch.setattr(store.runner, "_request", answer)
    with pytest.warns(UserWarning, match="skipped: a damaged one") as warned:
        found = load_found(store, None)
    assert warned[0].filename == __file__
    assert found is not None and found[0] == 2 and found[1]["w"].tolist() == [2.0] * 3
    with pytest.warns(UserWarning, match="skipped") as warned:
        assert store.load_checkpoint()["w"].tolist() == [2.0] * 3
    assert warned[0].filename == __file__
    with pytest.warns(UserWarning, match="skipped"):
        found = load_found(store, 1)
    assert found is not None and found[0] == 1
    assert requests == [{}, {}, {"step": 1}] and not file.exists()

    def nothing(method: str, path: str, message: Any = None) -> dict[str, Any]:
        raise s4weights.NotFoundError(2, "no checkpoint")

    monkeypatch.setattr(store.runner, "_request", nothing)
    assert load_found(store, None) is None


def test_a_restored_file_that_is_out_of_sight_is_not_taken_for_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = s4weights.CheckpointStore(tmp_path / "store", runner="unix:///nobody")
    file = tmp_path / "elsewhere/restored.s4w"

    def answer(method: str, path: str, message: Any = None) -> dict[str, Any]:
        return {"step": 4, "path": str(file), "tier": "staged", "skipped": []}

    monkeypatch.setattr(store.runner, "_request", answer)
    with pytest.raises(s4weights.StorageError, match="cannot see") as raised:
        load_found(store, None)
    assert raised.value.filename == str(file)
    assert not isinstance(raised.value, s4weights.NotFoundError)
