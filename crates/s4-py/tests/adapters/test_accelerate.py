"""Accelerate's save_state and load_state: saved, killed, resumed."""

from __future__ import annotations

import copy
import gc
import os
import shutil
import tempfile
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import s4weights
from compare import assert_identical
from harness import Layer, die, run_guide

pytest.importorskip("accelerate", reason="needs accelerate")

from accelerate import Accelerator

from s4weights.adapters import accelerate as adapter
from s4weights.adapters.accelerate import load_state, register_hooks, save_state

STEPS = 9
HOW = ["store", "background", "hooks", "both"]


class Run:
    """A loop as users of Accelerate write it."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.accelerator = Accelerator(cpu=True)
        model = torch.nn.Sequential(Layer(24, 90), torch.nn.Dropout(0.3), Layer(90, 24))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            model, optimizer, scheduler
        )

    def step(self) -> None:
        x = torch.randn(6, 24)
        loss = (self.model(x) - x).square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {
            "model": copy.deepcopy(self.model.state_dict()),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "scheduler": copy.deepcopy(self.scheduler.state_dict()),
            "random": torch.get_rng_state(),
        }


def train(folder: Path, how: str, die_at: int | None = None) -> tuple[dict[str, Any], ...]:
    """Returns the states that were loaded, if any, and the one at the end."""
    run, first = Run(), 0
    store = s4weights.CheckpointStore(folder / "store")
    plain = folder / "plain"
    if how in ("hooks", "both"):
        register_hooks(run.accelerator)
    if how == "hooks":
        if (plain / "step").exists():
            first = int((plain / "step").read_text())
            run.accelerator.load_state(str(plain / str(first)))
    else:
        first = load_state(run.accelerator, store) or 0
    loaded = [run.state()] if first else []
    if die_at is not None:
        # Dies after the weights are written and before the optimizer is.
        run.accelerator.register_save_state_pre_hook(lambda *_: step == die_at and die())
    for step in range(first + 1, STEPS + 1):
        run.step()
        if step % 3 == 0 and how == "hooks":
            run.accelerator.save_state(str(plain / str(step)))
            (plain / "step").write_text(str(step))
        elif step % 3 == 0:
            save_state(run.accelerator, store, step, blocking=how != "background")
    store.close()
    return *loaded, run.state()


def victim(folder: str, how: str) -> None:
    train(Path(folder), how, die_at=6)


#: Runs that are killed, for the fixture `killed`.
VICTIMS = [(victim, how) for how in HOW]


@pytest.fixture(scope="module")
def uninterrupted() -> list[dict[str, Any]]:
    """The states after each step, from that before the first on."""
    run = Run()
    states = [run.state()]
    for _ in range(STEPS):
        run.step()
        states.append(run.state())
    return states


@pytest.mark.parametrize("how", HOW)
def test_a_killed_run_resumes_to_the_same_bits(
    how: str, killed: Path, uninterrupted: list[dict[str, Any]]
) -> None:
    folder = killed / "test_accelerate" / how
    store = s4weights.CheckpointStore(folder / "store")
    if how == "hooks":
        assert (folder / "plain/step").read_text() == "3"
        names = {path.name for path in (folder / "plain/3").iterdir()}
        assert "model.s4w" in names and "model.safetensors" not in names
        assert {path.name for path in (folder / "plain/6").iterdir()} == {"model.s4w"}
    else:
        # The background thread may not have listed step 3 before the process was killed.
        assert store.latest() == 3 or (how == "background" and store.latest() is None)
    was_saved = how == "hooks" or store.latest() is not None
    states = train(folder, how)
    assert len(states) == 1 + was_saved
    if was_saved:
        assert_identical(states[0], uninterrupted[3])
    assert_identical(states[-1], uninterrupted[-1])
    if how != "hooks":
        assert store.latest() == STEPS
        weights = store.load_checkpoint()["model.s4w" if how == "both" else "model.safetensors"]
        assert {*weights} & {"s4w", "safetensors"}


def test_errors_reach_the_caller(tmp_path: Path) -> None:
    accelerator = Run().accelerator
    with pytest.raises(s4weights.NotFoundError):
        load_state(accelerator, tmp_path / "store", 5)
    assert load_state(accelerator, tmp_path / "store") is None
    (tmp_path / "file").touch()
    with pytest.raises(s4weights.S4Error):
        save_state(accelerator, tmp_path / "file", 1)


@pytest.mark.skipif(os.name != "posix", reason="there are no such permissions")
def test_nobody_else_can_change_what_is_being_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate unpickles some of it."""
    run = Run()
    save_state(run.accelerator, tmp_path / "store", 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    modes: list[int] = []

    def look(*others: Any) -> None:
        modes.extend(path.stat().st_mode & 0o777 for path in (tmp_path / "tmp").iterdir())

    run.accelerator.register_load_state_pre_hook(look)
    before = os.umask(0)
    try:
        assert load_state(run.accelerator, tmp_path / "store") == 1
    finally:
        os.umask(before)
    assert modes == [0o700] and not [*(tmp_path / "tmp").iterdir()]


def test_hooks_can_be_removed_and_leave_other_folders_alone(tmp_path: Path) -> None:
    run = Run()
    run.accelerator.save_state(str(tmp_path / "before"))
    handles = register_hooks(run.accelerator, preset="fast")
    run.step()
    stepped = {name: t.clone() for name, t in run.model.state_dict().items()}
    run.accelerator.save_state(str(tmp_path / "hooked"))
    run.accelerator.load_state(str(tmp_path / "before"))
    assert not torch.equal(run.model.state_dict()["0.weight"], stepped["0.weight"])
    run.accelerator.load_state(str(tmp_path / "hooked"))
    assert_identical(dict(run.model.state_dict()), stepped)
    for handle in handles:
        handle.remove()
    run.accelerator.save_state(str(tmp_path / "after"))
    assert (tmp_path / "after/model.safetensors").exists()


@pytest.mark.parametrize("each_node", [False, True])
def test_hooks_write_on_each_node_if_accelerate_does(each_node: bool, tmp_path: Path) -> None:
    """As the first process of the second machine, whose folder has weights of an earlier save."""
    hooks: list[Any] = []
    accelerator = SimpleNamespace(
        is_main_process=False,
        is_local_main_process=True,
        project_configuration=SimpleNamespace(save_on_each_node=each_node),
        register_save_state_pre_hook=hooks.append,
        register_load_state_pre_hook=hooks.append,
        wait_for_everyone=lambda: None,
    )
    register_hooks(accelerator)
    (tmp_path / "model.safetensors").touch()
    model = torch.nn.Linear(2, 2)
    weights = [model.state_dict()]
    hooks[0]([model], weights, str(tmp_path))
    assert weights == []
    written = "model.s4w" if each_node else "model.safetensors"
    assert [path.name for path in tmp_path.iterdir()] == [written]


def test_background_saves_to_a_path_keep_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, open_native = Run().accelerator, s4weights.CheckpointStore._open
    begun = threading.Event()

    def slow_at_first(store: Any, mode: str) -> Any:
        if not begun.is_set():
            begun.set()
            time.sleep(0.5)
        return open_native(store, mode)

    monkeypatch.setattr(s4weights.CheckpointStore, "_open", slow_at_first)
    for step in (1, 2):
        save_state(accelerator, tmp_path / "store", step, blocking=False)
    # Other options make another store, which waits as well.
    save_state(accelerator, str(tmp_path / "store"), 3, blocking=False, threads=1)
    assert load_state(accelerator, tmp_path / "store") == 3
    entries = s4weights.CheckpointStore(tmp_path / "store").list()
    assert [entry.step for entry in entries] == [1, 2, 3]


def test_a_background_save_to_a_path_that_fails_is_raised_by_the_next_call(tmp_path: Path) -> None:
    accelerator, store = Run().accelerator, tmp_path / "store"
    store.touch()
    save_state(accelerator, store, 1, blocking=False)
    with pytest.raises(s4weights.S4Error):
        save_state(accelerator, store, 2, blocking=False)
    store.unlink()
    save_state(accelerator, store, 2, blocking=False)
    assert load_state(accelerator, store) == 2


def test_a_store_that_is_removed_is_made_again(tmp_path: Path) -> None:
    accelerator, store = Run().accelerator, tmp_path / "store"
    how: dict[str, Any] = {"storage_options": {"secret_access_key": "hush"}}
    for step in (1, 2):
        pending = save_state(accelerator, store, step, blocking=False, **how)
        assert pending is not None
        pending.wait()
        assert load_state(accelerator, store, **how) == step
        assert s4weights.CheckpointStore(store).latest() == step
        shutil.rmtree(store)
    assert load_state(accelerator, store, **how) is None
    assert "hush" not in repr([*adapter._stores[accelerator]])


@pytest.mark.parametrize("saved", [1, 4])
@pytest.mark.parametrize("first", [load_state, save_state])
def test_a_store_that_was_made_anew_is_used(first: Any, saved: int, tmp_path: Path) -> None:
    accelerator, folder = Run().accelerator, tmp_path / "store"
    for step in (1, 2):
        save_state(accelerator, folder, step)
    shutil.rmtree(folder)
    # By another program, which has another handle.
    with s4weights.CheckpointStore(folder) as store:
        for step in range(11, 11 + saved):
            save_state(accelerator, store, step)
    if first is load_state:
        assert load_state(accelerator, folder) == 10 + saved
    save_state(accelerator, folder, 20)
    assert load_state(accelerator, folder) == 20
    steps = [entry.step for entry in s4weights.CheckpointStore(folder).list()]
    assert steps == [*range(11, 11 + saved), 20]


def test_a_save_that_was_lost_with_its_store_is_an_error(tmp_path: Path) -> None:
    accelerator, folder = Run().accelerator, tmp_path / "store"
    save_state(accelerator, folder, 1)
    begun, go = threading.Event(), threading.Event()
    (store,) = adapter._stores[accelerator].values()
    save = store.save_checkpoint

    def slowly(*values: Any, **how: Any) -> Any:
        def wait(done: int, total: int) -> None:
            if done and not begun.is_set():
                begun.set()
                assert go.wait(60)

        return save(*values, **how, progress=wait)

    store.save_checkpoint = slowly  # type: ignore[method-assign, assignment]
    save_state(accelerator, folder, 2, blocking=False)
    assert begun.wait(60)
    shutil.rmtree(folder)
    s4weights.CheckpointStore(folder).save_checkpoint({"w": torch.ones(9)}, 11)
    go.set()
    with pytest.raises(s4weights.S4Error):
        save_state(accelerator, folder, 3)
    save_state(accelerator, folder, 3)
    assert [entry.step for entry in s4weights.CheckpointStore(folder).list()] == [11, 3]


def test_stores_go_with_their_accelerator(tmp_path: Path) -> None:
    accelerator = Run().accelerator
    for name in ("a", "b", "a"):
        save_state(accelerator, tmp_path / name, 1, blocking=False)
    stores = [weakref.ref(store) for store in adapter._stores[accelerator].values()]
    assert len(stores) == 2
    del accelerator
    for name in ("a", "b"):
        assert load_state(Run().accelerator, tmp_path / name) == 1
    gc.collect()
    assert [store() for store in stores] == [None, None]


def test_the_newest_is_the_runners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, there = Run(), s4weights.CheckpointStore(tmp_path / "there")
    save_state(run.accelerator, there, 4)
    wanted = {name: t.clone() for name, t in run.model.state_dict().items()}
    run.step()
    store = s4weights.CheckpointStore(tmp_path / "store", runner="unix:///nobody")
    file = tmp_path / "restored.s4w"

    def answer(method: str, path: str, message: object = None) -> dict[str, Any]:
        assert path == "/v1/restore"
        s4weights.save(there.load_checkpoint(4), file)
        return {"step": 4, "path": str(file), "tier": "staged", "skipped": []}

    monkeypatch.setattr(store.runner, "_request", answer)
    assert load_state(run.accelerator, store) == 4
    assert_identical(dict(run.model.state_dict()), wanted)
    assert not file.exists()


def test_hooks_leave_no_weights_of_an_earlier_save(tmp_path: Path) -> None:
    run, folder = Run(), tmp_path / "folder"
    other = run.accelerator.prepare(torch.nn.Linear(3, 3))
    kinds = ("model.safetensors", "model_1.safetensors", "pytorch_model.bin", "pytorch_model_1.bin")
    for safe in (True, False):
        run.accelerator.save_state(str(folder), safe_serialization=safe)
    assert {*kinds} <= {path.name for path in folder.iterdir()}
    handles = register_hooks(run.accelerator)
    run.accelerator.save_state(str(folder))
    assert not {*kinds} & {path.name for path in folder.iterdir()}
    assert (folder / "model_1.s4w").exists()
    run.accelerator.load_state(str(folder))
    for handle in handles:
        handle.remove()
    torch.nn.init.ones_(other.weight)
    run.accelerator.save_state(str(folder))
    register_hooks(run.accelerator)
    with pytest.raises(s4weights.ConflictError, match=r"model\.s4w and .*model\.safetensors"):
        run.accelerator.load_state(str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(s4weights.ConflictError, match=r"model_1\.s4w and"):
        run.accelerator.load_state(str(folder))
    shutil.rmtree(folder)


def test_the_guide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: list[dict[str, Any]]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run()
    names = {"accelerator": run.accelerator, "train_one_step": run.step, "steps": STEPS}
    names = run_guide("accelerate.md", names)
    assert names["store"].latest() == STEPS and names["first"] == 0
    assert_identical(run.state(), uninterrupted[-1])
    assert (tmp_path / "checkpoint/model.s4w").exists()
    assert s4weights.verify(tmp_path / "patched/optimizer.bin")["tensors"] > 0
