"""Accelerate's save_state and load_state: saved, killed, resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from compare import assert_identical
from harness import die, run_guide

pytest.importorskip("accelerate", reason="needs accelerate")

from accelerate import Accelerator

from s4weights.adapters.accelerate import load_state, register_hooks, save_state

STEPS = 9
HOW = ["store", "background", "hooks", "both"]


class Run:
    """A loop as users of Accelerate write it."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.accelerator = Accelerator(cpu=True)
        model = torch.nn.Sequential(
            torch.nn.Linear(24, 90), torch.nn.Dropout(0.3), torch.nn.Linear(90, 24)
        )
        model[2].bias = model[0].weight.__class__(torch.zeros(24))
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
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": torch.get_rng_state(),
        }


def train(folder: Path, how: str, die_at: int | None = None) -> dict[str, Any]:
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
    return run.state()


def victim(folder: str, how: str) -> None:
    train(Path(folder), how, die_at=6)


#: Runs that are killed, for the fixture `killed`.
VICTIMS = [(victim, how) for how in HOW]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = Run()
    for _ in range(STEPS):
        run.step()
    return run.state()


@pytest.mark.parametrize("how", HOW)
def test_a_killed_run_resumes_to_the_same_bits(
    how: str, killed: Path, uninterrupted: dict[str, Any]
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
    assert_identical(train(folder, how), uninterrupted)
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


def test_the_guide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run()
    names = {"accelerator": run.accelerator, "train_one_step": run.step, "steps": STEPS}
    names = run_guide("accelerate.md", names)
    assert names["store"].latest() == STEPS and names["first"] == 0
    assert_identical(run.state(), uninterrupted)
    assert (tmp_path / "checkpoint/model.s4w").exists()
    assert s4weights.verify(tmp_path / "patched/optimizer.bin")["tensors"] > 0
