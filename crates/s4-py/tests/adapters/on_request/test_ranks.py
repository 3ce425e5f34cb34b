"""Accelerate and the Trainer of transformers on two ranks. Run by ``cargo xtask test --adapters``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from compare import assert_identical
from harness import run_ranks

pytest.importorskip("accelerate", reason="needs accelerate")
pytest.importorskip("transformers", reason="needs transformers")


def accelerate_run(folder: str) -> None:
    from test_accelerate import Run

    from s4weights.adapters.accelerate import load_state, register_hooks, save_state

    run = Run()
    accelerator = run.accelerator
    rank = accelerator.process_index
    assert accelerator.num_processes == 2
    torch.manual_seed(rank)
    for step in (1, 2):
        run.step()
        save_state(accelerator, f"{folder}/store", step)
    before = copy.deepcopy(run.state())
    expected = torch.randn(3)
    run.step()
    assert load_state(accelerator, f"{folder}/store") == 2
    assert_identical(run.state(), before)
    assert torch.equal(torch.randn(3), expected)  # Each rank has its own random state.
    # A failure of the first process is raised in both.
    with pytest.raises(s4weights.NotFoundError):
        load_state(accelerator, f"{folder}/store", 7)
    Path(folder, "file").touch()
    accelerator.wait_for_everyone()
    with pytest.raises(s4weights.S4Error):
        save_state(accelerator, f"{folder}/file", 3)
    register_hooks(accelerator)
    accelerator.save_state(f"{folder}/hooked")
    accelerator.load_state(f"{folder}/hooked")
    torch.distributed.destroy_process_group()


def trainer_run(folder: str, resume: str) -> None:
    import os

    from test_transformers import trainer_of

    from s4weights.adapters.transformers import StoreCallback, restore

    os.environ["ACCELERATE_USE_CPU"] = "true"
    if resume:
        with pytest.raises(RuntimeError, match="create TrainingArguments first"):
            restore(f"{folder}/store", f"{folder}/out")
    trainer = trainer_of(Path(folder), StoreCallback(f"{folder}/store", keep_folders=False))
    assert trainer.args.world_size == 2
    found: Any = None
    if resume:
        found = restore(f"{folder}/store", trainer.args.output_dir, 6)
        assert found.endswith("checkpoint-6")
        assert Path(found, f"rng_state_{trainer.args.process_index}.pth").exists()
        with pytest.raises(s4weights.NotFoundError):
            restore(f"{folder}/store", trainer.args.output_dir, 5)
    trainer.train(resume_from_checkpoint=found)
    if trainer.args.process_index == 0:
        torch.save(trainer.model.state_dict(), f"{folder}/end{resume}.pt")
    torch.distributed.destroy_process_group()


def test_accelerate(tmp_path: Path) -> None:
    assert run_ranks(2, "test_ranks", "accelerate_run", str(tmp_path)) == [0, 0]
    store = s4weights.CheckpointStore(tmp_path / "store")
    assert {"random_states_0.pkl", "random_states_1.pkl"} <= store.load_checkpoint().keys()
    assert [path.name for path in (tmp_path / "hooked").glob("*.s4w")] == ["model.s4w"]


def test_trainer(tmp_path: Path) -> None:
    assert run_ranks(2, "test_ranks", "trainer_run", str(tmp_path), "") == [0, 0]
    assert run_ranks(2, "test_ranks", "trainer_run", str(tmp_path), "-resumed") == [0, 0]
    ends = [torch.load(tmp_path / name) for name in ("end.pt", "end-resumed.pt")]
    assert_identical(*ends)
