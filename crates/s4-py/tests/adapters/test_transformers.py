"""The Trainer of transformers: saved, killed, resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import s4weights
from compare import assert_identical
from harness import Layer, die, run_guide

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")

import transformers.integrations.integration_utils
from transformers import Trainer, TrainerCallback, TrainingArguments

from s4weights.adapters.transformers import StoreCallback, restore

STEPS = 10
HOW = ["blocking", "background", "no-folders"]


class Model(torch.nn.Module):
    """An embedding tied to the output, and dropout, so that the random state matters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(40, 48)
        self.layers = torch.nn.Sequential(
            Layer(48, 128), torch.nn.GELU(), torch.nn.Dropout(0.2), Layer(128, 48)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(self.embed(x)) @ self.embed.weight.T
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        made = torch.randint(0, 40, (13,), generator=torch.Generator().manual_seed(number))
        return {"x": made[:-1], "labels": made[1:]}


class DieAfterSaving(TrainerCallback):
    """Dies when step 8 is in its folder but not yet in the store."""

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == 8:
            die()


def arguments_of(folder: Path, **others: Any) -> TrainingArguments:
    return TrainingArguments(
        str(folder / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        save_steps=2,
        save_total_limit=2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        seed=3,
        **others,
    )


def trainer_of(folder: Path, *callbacks: TrainerCallback, **others: Any) -> Trainer:
    args = arguments_of(folder, **others)
    torch.manual_seed(0)
    return Trainer(Model(), args, train_dataset=Data(), callbacks=[*callbacks])


def callback(how: str, folder: Path) -> StoreCallback:
    return StoreCallback(
        folder / "store", blocking=how != "background", keep_folders=how != "no-folders"
    )


def fit(folder: Path, resume: str | None, *callbacks: TrainerCallback) -> dict[str, Any]:
    trainer = trainer_of(folder, *callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "losses": [entry.get("loss") for entry in trainer.state.log_history if "loss" in entry],
        "random": torch.get_rng_state(),
    }


def victim(folder: str, how: str) -> None:
    fit(Path(folder), None, DieAfterSaving(), callback(how, Path(folder)))


#: Runs that are killed, for the fixture `killed`.
VICTIMS = [(victim, how) for how in HOW]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return fit(tmp_path_factory.mktemp("uninterrupted"), None)


@pytest.mark.parametrize("how", HOW)
def test_a_killed_run_resumes_to_the_same_bits(
    how: str, killed: Path, uninterrupted: dict[str, Any]
) -> None:
    folder = killed / "test_transformers" / how
    store = s4weights.CheckpointStore(folder / "store")
    # The save of step 6 may not have been finished.
    assert store.latest() == 6 or (how == "background" and store.latest() == 4)
    folders = sorted(path.name for path in (folder / "out").iterdir())
    assert "checkpoint-8" in folders and ("checkpoint-6" in folders) == (how != "no-folders")
    shutil.rmtree(folder / "out")  # As on another machine.
    resume = restore(store, folder / "out")
    assert resume == str(folder / f"out/checkpoint-{store.latest()}")
    assert_identical(fit(folder, resume, callback(how, folder)), uninterrupted)
    assert store.latest() == STEPS
    assert (folder / "out/checkpoint-10").exists() == (how != "no-folders")


def test_what_the_store_has_is_what_the_folder_had(tmp_path: Path) -> None:
    fit(tmp_path, None, callback("blocking", tmp_path))
    store = s4weights.CheckpointStore(tmp_path / "store")
    entries = store.list()
    assert [entry.step for entry in entries] == [2, 4, 6, 8, 10]
    assert {entry.kind for entry in entries} == {"base", "delta"}
    assert "loss" in entries[-1].metrics and "step" not in entries[-1].metrics
    folder = Path(restore(store, tmp_path / "again") or "")
    before = tmp_path / "out/checkpoint-10"
    names = sorted(path.name for path in before.iterdir())
    assert names == sorted(path.name for path in folder.iterdir())
    assert {"model.safetensors", "optimizer.pt", "rng_state.pth", "training_args.bin"} <= set(names)
    for name in names:
        if name in ("optimizer.pt", "scheduler.pt"):
            loaded = [torch.load(path / name, weights_only=True) for path in (before, folder)]
            assert_identical(*loaded)
        else:
            assert (before / name).read_bytes() == (folder / name).read_bytes(), name
    kept = s4weights.load_checkpoint(store.url)
    assert {*kept["optimizer.pt"]} == {"torch"} and {*kept["rng_state.pth"]} == {"bytes"}
    assert restore(tmp_path / "nothing", tmp_path / "again") is None
    with pytest.raises(s4weights.NotFoundError):
        restore(store, tmp_path / "again", 7)


def test_the_newest_is_the_runners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(tmp_path, None, callback("blocking", tmp_path))
    there = s4weights.CheckpointStore(tmp_path / "store")
    store = s4weights.CheckpointStore(tmp_path / "other", runner="unix:///nobody")
    file = tmp_path / "restored.s4w"

    def answer(method: str, path: str, message: Any = None) -> dict[str, Any]:
        assert path == "/v1/restore" and "step" not in message
        if there.latest() is None:
            raise s4weights.NotFoundError(2, "no checkpoint")
        s4weights.save(there.load_checkpoint(8), file)
        return {"step": 8, "path": str(file), "tier": "staged", "skipped": []}

    monkeypatch.setattr(store.runner, "_request", answer)
    assert restore(store, tmp_path / "again") == str(tmp_path / "again/checkpoint-8")
    assert (tmp_path / "again/checkpoint-8/model.safetensors").exists() and not file.exists()
    there = s4weights.CheckpointStore(tmp_path / "nothing")
    assert restore(store, tmp_path / "again") is None


@pytest.mark.skipif(
    "enable_jit_checkpoint" not in TrainingArguments.__dataclass_fields__,
    reason="this version saves nothing when it is told to end",
)
@pytest.mark.parametrize("moment", ["on_step_begin", "on_pre_optimizer_step"])
def test_what_is_saved_before_the_process_ends(moment: str, tmp_path: Path) -> None:
    class End(TrainerCallback):
        """As SIGTERM, three seconds later."""

    def request(self: Any, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == 5:
            (ends,) = (c for c in trainer.callback_handler.callbacks if hasattr(c, "jit_manager"))
            ends.jit_manager.is_checkpoint_requested = True
            getattr(ends, moment)(args, state, control)

    setattr(End, moment, request)
    (tmp_path / "out/checkpoint-900").mkdir(parents=True)
    (tmp_path / "out/checkpoint-900/trainer_state.json").touch()  # Of an earlier run.
    trainer = trainer_of(
        tmp_path, End(), callback("background", tmp_path), enable_jit_checkpoint=True
    )
    trainer.args.save_steps, trainer.args.save_total_limit = 4, None
    trainer.train()
    assert (tmp_path / "out/checkpoint-5").exists()
    store = s4weights.CheckpointStore(tmp_path / "store")
    assert [entry.step for entry in store.list()] == [4, 5]
    assert "loss" in store.list()[-1].metrics


def test_a_best_model_needs_its_folder(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, callback("no-folders", tmp_path))
    trainer.args.load_best_model_at_end = True
    with pytest.raises(ValueError, match="keep_folders=True"):
        trainer.train()


def test_trials_of_a_hyperparameter_search_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if there were a library for it, which has one trial.
    for module in (transformers.integrations, transformers.integrations.integration_utils):
        monkeypatch.setattr(module, "hp_params", lambda trial: {})
    stale = tmp_path / "out/checkpoint-2"
    stale.mkdir(parents=True)
    (stale / "old").touch()
    trainer = trainer_of(tmp_path, callback("blocking", tmp_path))
    trainer.model_init = lambda trial=None: Model()
    monkeypatch.setattr(trainer, "_hp_search_setup", lambda trial: None)
    with pytest.raises(ValueError, match="hyperparameter search is not supported"):
        trainer.train(trial=SimpleNamespace(number=0, params={}))
    assert not (tmp_path / "store").exists()


def test_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"Trainer": Trainer, "args": arguments_of(tmp_path), "model": Model(), "data": Data()}
    run_guide("transformers.md", names)
    assert (tmp_path / "out/checkpoint-4/model.safetensors").exists()
    assert s4weights.CheckpointStore("runs/a").latest() == STEPS
