"""Lightning's Trainer: saved, killed, resumed."""

from __future__ import annotations

import functools
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from compare import assert_identical
from harness import die, run_guide

pytest.importorskip("lightning", reason="needs lightning")

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from s4weights.adapters.lightning import FileCheckpointIO, StoreCheckpointIO, load_from_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

EPOCHS = 5
HOW = ["file", "file-background", "store", "store-background"]


class Model(LightningModule):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(32, width), torch.nn.GELU(), torch.nn.Linear(width, 32)
        )

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        # Lightning's checkpoints hold no state of random number generators.
        torch.manual_seed(self.global_step)
        loss = (self.layers(batch + 0.01 * torch.randn_like(batch)) - batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)]

    def train_dataloader(self) -> Any:
        data = torch.randn(24, 32, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.DataLoader(data, batch_size=8)


class Die(Callback):
    def on_train_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: Any, number: int
    ) -> None:
        if (trainer.current_epoch, number) == (3, 1):
            die()


def checkpoint_io(how: str, folder: Path) -> Any:
    kind, _, later = how.partition("-")
    if kind == "file":
        return FileCheckpointIO(blocking=not later)
    return StoreCheckpointIO(folder / "store", blocking=not later)


def trainer_of(io: Any, folder: Path, *callbacks: Callback, epochs: int = EPOCHS) -> Trainer:
    kept = ModelCheckpoint(folder / "kept", monitor="loss", save_top_k=2, save_last=True)
    return Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        plugins=[] if io is None else [io],
        callbacks=[kept, *callbacks],
        default_root_dir=folder,
        logger=False,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fit(io: Any, folder: Path, *callbacks: Callback) -> dict[str, Any]:
    """Trains, from the last checkpoint if there is one."""
    torch.manual_seed(0)
    model, trainer = Model(), trainer_of(io, folder, *callbacks)
    trainer.fit(model, ckpt_path="last")
    (optimizer,), (scheduler,) = trainer.optimizers, trainer.lr_scheduler_configs
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.scheduler.state_dict(),
        "step": trainer.global_step,
    }


def marked(path: Path) -> str:
    return str(json.loads(path.read_text(encoding="utf-8"))["s4weights"]["id"])


def victim(folder: str, how: str) -> None:
    fit(checkpoint_io(how, Path(folder)), Path(folder), Die())


#: Runs that are killed, for the fixture `killed`.
VICTIMS = [(victim, how) for how in HOW]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return fit(None, tmp_path_factory.mktemp("uninterrupted"))


@pytest.mark.parametrize("how", HOW)
def test_a_killed_run_resumes_to_the_same_bits(
    how: str, killed: Path, uninterrupted: dict[str, Any]
) -> None:
    folder = killed / "test_lightning" / how
    last = folder / "kept/last.ckpt"
    if how.startswith("file"):
        assert s4weights.inspect(last)["form"] == "tree"
    else:
        assert marked(last) in {
            entry.id for entry in s4weights.CheckpointStore(folder / "store").list()
        }
    io = checkpoint_io(how, folder)
    before = io.load_checkpoint(last)
    assert 2 <= before["epoch"] + 1 <= 3
    assert_identical(fit(io, folder), uninterrupted)


def test_what_lightning_removes_leaves_the_store(tmp_path: Path) -> None:
    # Bases only, since a delta keeps its parent.
    io = StoreCheckpointIO(tmp_path / "store", max_chain=1)
    trainer = trainer_of(io, tmp_path)
    trainer.fit(Model())
    kept = [*(tmp_path / "kept").iterdir()]
    assert len(kept) == 3 and tmp_path / "kept/last.ckpt" in kept
    assert {entry.id for entry in io.store.list()} == {marked(path) for path in kept}


def test_a_parent_goes_when_its_deltas_are_gone(tmp_path: Path) -> None:
    io = StoreCheckpointIO(tmp_path / "store")
    weights = torch.randn(300, 200)
    for step in range(3):
        io.save_checkpoint({"w": weights + step * 1e-5, "global_step": step}, tmp_path / f"{step}")
    assert [entry.kind for entry in io.store.list()] == ["base", "delta", "delta"]
    io.remove_checkpoint(tmp_path / "0")
    assert [entry.step for entry in io.store.list()] == [0, 1, 2]
    assert not (tmp_path / "0").exists()
    io.remove_checkpoint(tmp_path / "2")
    io.remove_checkpoint(tmp_path / "1")
    assert io.store.list() == []


@pytest.mark.parametrize("blocking", [False, True])
def test_a_store_with_a_runner(
    blocking: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    io = StoreCheckpointIO(tmp_path / "store", blocking=blocking, runner="unix:///nobody")
    requests: list[str] = []

    def answer(method: str, path: str, message: object = None) -> dict[str, Any]:
        requests.append(f"{method} {path}")
        return {"incoming": str(tmp_path)}

    monkeypatch.setattr(io.store.runner, "_request", answer)
    io.save_checkpoint({"w": torch.ones(9), "global_step": 1}, tmp_path / "first")
    io.teardown()
    assert (tmp_path / f"{marked(tmp_path / 'first')}.s4w").is_file()
    assert requests == ["GET /v1/staging", "POST /v1/submissions"]


@pytest.mark.parametrize("kind", ["file", "store"])
def test_a_save_in_the_background_that_fails_removes_nothing(kind: str, tmp_path: Path) -> None:
    failing = False

    def progress(done: int, total: int) -> None:
        if failing and done:
            raise OSError("no more")

    first, second = tmp_path / "first", tmp_path / "second"
    if kind == "file":
        io: Any = FileCheckpointIO(blocking=False, progress=progress)
    else:
        io = StoreCheckpointIO(tmp_path / "store", blocking=False)
        io.store.save_checkpoint = functools.partial(io.store.save_checkpoint, progress=progress)
    state = {"w": torch.randn(500, 500), "global_step": 1}
    io.save_checkpoint(state, first)
    io.teardown()
    failing = True
    io.save_checkpoint(state, second)
    with pytest.raises(OSError, match="no more"):
        io.remove_checkpoint(first)  # Raises the error if that save has ended by now.
        io.teardown()
    assert first.is_file()
    failing = False
    io.save_checkpoint(state, second)
    io.remove_checkpoint(first)
    io.teardown()
    assert second.is_file() and not first.exists()


def test_links_and_marks_that_are_written_again(tmp_path: Path) -> None:
    io = StoreCheckpointIO(tmp_path / "store", max_chain=1)
    for step in (1, 2):
        io.save_checkpoint({"w": torch.ones(9), "global_step": step}, tmp_path / "a.ckpt")
    assert [entry.step for entry in io.store.list()] == [2]
    os.symlink(tmp_path / "a.ckpt", tmp_path / "last.ckpt")
    assert io.load_checkpoint(tmp_path / "last.ckpt")["global_step"] == 2
    io.remove_checkpoint(tmp_path / "last.ckpt")
    assert [entry.step for entry in io.store.list()] == [2]
    copy = pickle.loads(pickle.dumps(io))
    assert copy.load_checkpoint(tmp_path / "a.ckpt")["global_step"] == 2


def test_what_was_saved_on_a_gpu_is_loaded_to_the_cpu(tmp_path: Path) -> None:
    # What `save` writes for a tensor on a GPU; this machine need not have one.
    path, w = tmp_path / "gpu.ckpt", torch.arange(4.0)
    writer = s4weights._core.Writer(str(path), None, None, "balanced", None, {})
    writer.write([("w", "float32", (4,), w.data_ptr(), 16)], b"", None)
    writer.finish('{"root":{"dict":[["w",{"tensor":0,"device":"cuda:0"}]]}}', {}, {})
    # As Lightning calls it.
    found = FileCheckpointIO().load_checkpoint(path)["w"]
    assert found.device.type == "cpu" and torch.equal(found, w)
    asked = FileCheckpointIO().load_checkpoint(path, map_location="meta")["w"]
    assert asked.device.type == "meta"


def test_load_from_checkpoint(tmp_path: Path, uninterrupted: dict[str, Any]) -> None:
    for io in (FileCheckpointIO(), StoreCheckpointIO(tmp_path / "store")):
        trainer = trainer_of(io, tmp_path / type(io).__name__, epochs=1)
        model = Model(width=40)
        trainer.fit(model)
        path = trainer.checkpoint_callback.last_model_path
        loaded = load_from_checkpoint(Model, path)
        assert loaded.hparams.width == 40
        assert_identical(loaded.state_dict(), model.state_dict())
        with pytest.raises(Exception, match=r"[Ww]eights only|UnpicklingError|invalid"):
            Model.load_from_checkpoint(path)  # As the guide says.


def test_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}

    def make(**arguments: Any) -> Trainer:
        return Trainer(accelerator="cpu", max_epochs=2, log_every_n_steps=1, **quiet, **arguments)

    names = run_guide("lightning.md", {"Trainer": make, "Model": Model, "model": Model()})
    assert_identical(names["again"].state_dict(), names["model"].state_dict())
    assert names["store"].latest() == 6 and names["trainer"].global_step == 6


@pytest.mark.parametrize("how", HOW)
def test_the_last_checkpoint_may_be_a_link(tmp_path: Path, how: str) -> None:
    io = checkpoint_io(how, tmp_path)
    kept = ModelCheckpoint(tmp_path / "new" / "kept", every_n_train_steps=2, save_last="link")
    trainer = Trainer(
        accelerator="cpu",
        max_steps=4,
        plugins=[io],
        callbacks=[kept],
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model())
    last = tmp_path / "new" / "kept" / "last.ckpt"
    assert last.is_symlink() and last.is_file()
