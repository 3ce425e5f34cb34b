"""Lightning's Trainer: saved, killed, resumed."""

from __future__ import annotations

import functools
import json
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from compare import assert_identical
from harness import Layer, die, run_guide

pytest.importorskip("lightning", reason="needs lightning")

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from s4weights.adapters import lightning as adapter
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
        self.layers = torch.nn.Sequential(Layer(32, width), torch.nn.GELU(), Layer(width, 32))

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
    for step, name in enumerate(("first", "second")):
        io.save_checkpoint({"w": torch.ones(9), "global_step": step}, tmp_path / name)
        assert (io._running is None) == (blocking or name == "first")
        io.teardown()
        assert (tmp_path / f"{marked(tmp_path / name)}.s4w").is_file()
    assert requests == ["GET /v1/staging", "POST /v1/submissions"] * 2


class FakeRunner:
    """Answers as a runner does that has published each submission but those in ``open``."""

    def __init__(self, folder: Path) -> None:
        self.store = s4weights.CheckpointStore(folder / "store", max_chain=1)
        self.folder, self.open, self.knows = folder, set[str](), True
        self.submitted: dict[str, int] = {}

    def answer(self, method: str, path: str, message: Any = None) -> dict[str, Any]:
        if path == "/v1/staging":
            return {"incoming": str(self.folder)}
        if path == "/v1/submissions":
            self.submitted[message["id"]] = message["step"]
            self.open.add(message["id"])
            return {}
        if path == "/v1/restore":
            wanted = message.get("id", next(reversed(self.submitted), None))
            if not self.knows or wanted not in self.submitted:
                raise s4weights.NotFoundError(2, "runner: no such submission")
            file = self.folder / "restored.s4w"
            file.write_bytes((self.folder / f"{wanted}.s4w").read_bytes())
            step = self.submitted[wanted]
            return {"step": step, "path": str(file), "tier": "staged", "skipped": []}
        id = path.removeprefix("/v1/submissions/").partition("?")[0]
        if not self.knows or id not in self.submitted:
            raise s4weights.NotFoundError(2, "runner: no such submission")
        return {"state": "staged" if id in self.open else "durable"}

    def publish(self) -> None:
        for id in [id for id in self.submitted if id in self.open]:
            state = s4weights.load(self.folder / f"{id}.s4w")
            self.store.save_checkpoint(state, self.submitted[id], tags={"s4w.submission": id})
            self.open.remove(id)


def test_submissions_and_checkpoints_of_the_store_are_found_by_either_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    io = StoreCheckpointIO(tmp_path / "store", runner="unix:///nobody")
    runner = FakeRunner(tmp_path)
    monkeypatch.setattr(io.store.runner, "_request", runner.answer)
    paths = [tmp_path / f"{step}.ckpt" for step in range(3)]
    for step, path in enumerate(paths):
        io.save_checkpoint({"w": torch.ones(9), "global_step": step}, path)
    # Not in the store yet: the runner has it, and knows which one is the newest.
    assert io.load_checkpoint(paths[1])["global_step"] == 1
    newest = io.restore(tmp_path / "new")
    assert Path(newest).name == "step=2.ckpt"
    assert io.load_checkpoint(newest)["global_step"] == 2
    # What Lightning removes is deleted once it is there.
    io.remove_checkpoint(paths[0])
    runner.publish()
    assert [entry.step for entry in runner.store.list()] == [0, 1, 2]
    io.remove_checkpoint(paths[2])
    assert [entry.step for entry in runner.store.list()] == [1]
    assert io._unwanted == []
    # Without the runner, and after it has forgotten the submission.
    for other in (StoreCheckpointIO(tmp_path / "store"), io):
        runner.knows = False
        assert other.load_checkpoint(paths[1])["global_step"] == 1
    # The small file that a process without a runner wrote.
    runner.knows = True
    there = StoreCheckpointIO(tmp_path / "store").restore(tmp_path / "new")
    assert io.load_checkpoint(there)["global_step"] == 1
    with pytest.raises(s4weights.NotFoundError):
        StoreCheckpointIO(tmp_path / "store").restore(tmp_path / "new", 7)


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


class Gate:
    """Stops saves in the background until it is opened, or makes them fail."""

    def __init__(self, io: Any) -> None:
        self.open, self.failing = threading.Event(), False
        self.open.set()
        if isinstance(io, FileCheckpointIO):
            io._options["progress"] = self.progress
        else:
            io.store.save_checkpoint = functools.partial(
                io.store.save_checkpoint, progress=self.progress
            )

    def progress(self, done: int, total: int) -> None:
        if done:  # The first call is still in the foreground.
            assert self.open.wait(60)
            if self.failing:
                raise OSError("no more")


BACKGROUND = ["file-background", "store-background"]


@pytest.mark.parametrize("how", BACKGROUND)
def test_until_a_save_is_done_its_path_leads_to_the_one_before(how: str, tmp_path: Path) -> None:
    io = checkpoint_io(how, tmp_path)
    gate, paths = Gate(io), [tmp_path / f"kept/{step}.ckpt" for step in range(4)]
    last = tmp_path / "kept/last.ckpt"
    w = torch.randn(500, 500)
    io.save_checkpoint({"w": w, "global_step": 0}, paths[0])
    assert io._running is None  # The first has none before it.
    for step in (1, 2, 3):
        gate.open.clear()
        if step == 2:
            # A link to what is not there, such as Lightning has made, does not count.
            os.symlink(tmp_path / "nowhere", paths[2])
        io.save_checkpoint({"w": w + step, "global_step": step}, paths[step])
        last.unlink(missing_ok=True)
        last.symlink_to(paths[step].name)
        io.remove_checkpoint(paths[step - 1])
        # As a process that resumes after this one was killed.
        with pytest.warns(UserWarning, match=r"last\.ckpt: its save did not finish"):
            found = checkpoint_io(how, tmp_path).load_checkpoint(last)
        assert found["global_step"] == step - 1
        gate.open.set()
        io.teardown()
        assert not paths[step].is_symlink() and not paths[step - 1].exists()
        assert checkpoint_io(how, tmp_path).load_checkpoint(last)["global_step"] == step


@pytest.mark.parametrize("how", BACKGROUND)
def test_the_path_of_a_save_that_failed_leads_to_the_one_before(how: str, tmp_path: Path) -> None:
    io = checkpoint_io(how, tmp_path)
    gate, w = Gate(io), torch.randn(500, 500)
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    unsaved = {"w": w, "global_step": 1, "f": threading.Lock()}
    io.save_checkpoint({"w": w, "global_step": 0}, first)
    gate.failing = True
    io.save_checkpoint({"w": w + 1, "global_step": 1}, second)
    with pytest.raises(OSError, match="no more"):
        io.teardown()
    # Lightning may have linked to it; so nor does a call after that take it away.
    gate.failing = False
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        io.save_checkpoint(unsaved, second)
        io.teardown()
    with pytest.warns(UserWarning, match="its save did not finish"):
        assert io.load_checkpoint(second)["global_step"] == 0
    # No file stands in for a save that did not even begin.
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        io.save_checkpoint(unsaved, third)
    assert not third.exists()
    # A checkpoint that was there before stays.
    gate.failing = True
    io.save_checkpoint({"w": w + 3, "global_step": 3}, first)
    with pytest.raises(OSError, match="no more"):
        io.teardown()
    assert io.load_checkpoint(first)["global_step"] == 0
    io.remove_checkpoint(second)
    io.remove_checkpoint(first)
    assert not second.exists() and not first.exists()


@pytest.mark.parametrize("how", BACKGROUND)
def test_the_last_checkpoint_can_be_loaded_after_a_save_that_failed(how: str, tmp_path: Path) -> None:
    class Full(Callback):
        """The disk is full, in the first run."""

        def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
            started.append(trainer.global_step)

        def on_train_batch_start(self, trainer: Trainer, *others: Any) -> None:
            gate.failing = trainer.global_step >= 3 and len(started) == 1

    def train() -> None:
        Trainer(
            accelerator="cpu",
            max_steps=6,
            plugins=[io],
            callbacks=[
                ModelCheckpoint(
                    tmp_path / "kept", every_n_train_steps=2, save_last="link", save_top_k=-1
                ),
                Full(),
            ],
            default_root_dir=tmp_path,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(Model(), ckpt_path="last")

    started: list[int] = []
    io = checkpoint_io(how, tmp_path)
    gate = Gate(io)
    with pytest.raises(OSError, match="no more"):
        train()
    assert (tmp_path / "kept/last.ckpt").is_file()
    io = checkpoint_io(how, tmp_path)
    gate = Gate(io)
    train()
    assert started == [0, 2]


@pytest.mark.parametrize("how", BACKGROUND)
def test_what_was_removed_stands_for_nothing(how: str, tmp_path: Path) -> None:
    """As Lightning does when it looks for a learning rate before the training."""
    io = checkpoint_io(how, tmp_path)
    search, first, second = (tmp_path / name for name in (".lr_find.ckpt", "first", "second"))
    io.save_checkpoint({"w": torch.zeros(500, 500), "global_step": 0}, search)
    io.remove_checkpoint(search)
    io.save_checkpoint({"w": torch.ones(500, 500), "global_step": 1}, first)
    assert io._running is None and checkpoint_io(how, tmp_path).load_checkpoint(first)
    gate = Gate(io)
    gate.open.clear()
    io.save_checkpoint({"w": torch.ones(500, 500), "global_step": 2}, second)
    assert checkpoint_io(how, tmp_path).load_checkpoint(second)["global_step"] == 1
    gate.open.set()
    io.teardown()


def test_urls_of_object_stores_are_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    io = FileCheckpointIO(blocking=False)
    taken: list[dict[str, Any]] = []

    def save(obj: Any, target: str, **how: Any) -> Any:
        taken.append(how)
        return s4weights.save(obj, tmp_path / Path(target).name, blocking=how.get("blocking", True))

    def url_to_fs(path: str) -> Any:
        raise ImportError("s3fs")

    monkeypatch.setattr(adapter, "save", save)
    monkeypatch.setattr(adapter.fsspec.core, "url_to_fs", url_to_fs)
    options = {"region": "x"}
    for step in (1, 2):
        state = {"w": torch.ones(9), "global_step": step}
        io.save_checkpoint(state, f"s3://bucket/{step}.ckpt", options)
        io.teardown()
    assert taken[1] == {"storage_options": options, "blocking": False}
    assert s4weights.load(tmp_path / "2.ckpt")["global_step"] == 2


@pytest.mark.parametrize("how", HOW)
def test_a_better_checkpoint_of_the_same_name_is_kept(how: str, tmp_path: Path) -> None:
    io = checkpoint_io(how, tmp_path)
    gate = Gate(io)

    class Losses(Callback):
        def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
            trainer.callback_metrics["score"] = torch.tensor([3.0, 1.0, 2.0][trainer.current_epoch])

        def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
            # Saves of the epoch before are still running when the next one begins.
            gate.open.set()

    kept = ModelCheckpoint(tmp_path / "kept", "model", monitor="score", save_top_k=3)
    save = kept._save_checkpoint

    def save_slowly(trainer: Trainer, path: str) -> None:
        if not io.blocking and io._before is not None:
            threading.Timer(0.2, gate.open.set).start()
            gate.open.clear()
        save(trainer, path)

    kept._save_checkpoint = save_slowly  # type: ignore[method-assign]
    trainer = trainer_of(io, tmp_path, Losses(), epochs=3)
    trainer.callbacks[:] = [c for c in trainer.callbacks if not isinstance(c, ModelCheckpoint)]
    trainer.callbacks.append(kept)
    trainer.fit(Model())
    names = {path.name: io.load_checkpoint(path)["epoch"] for path in (tmp_path / "kept").iterdir()}
    assert names == {"model.ckpt": 0, "model-v1.ckpt": 1, "model-v2.ckpt": 2}
    assert io.load_checkpoint(kept.best_model_path)["epoch"] == 1


@pytest.mark.parametrize("how", HOW)
def test_what_a_link_leads_to_is_not_overwritten(how: str, tmp_path: Path) -> None:
    io = checkpoint_io(how, tmp_path)
    best, last = tmp_path / "best.ckpt", tmp_path / "last.ckpt"
    io.save_checkpoint({"w": torch.ones(9), "global_step": 1}, best)
    last.symlink_to("best.ckpt")
    io.save_checkpoint({"w": torch.ones(9), "global_step": 2}, last)
    io.teardown()
    assert not last.is_symlink() and io.load_checkpoint(last)["global_step"] == 2
    assert io.load_checkpoint(best)["global_step"] == 1
    assert {path.name for path in tmp_path.iterdir()} - {"store"} == {"best.ckpt", "last.ckpt"}


@pytest.mark.parametrize("how", HOW)
def test_weights_that_a_launcher_saves_are_a_file(how: str, tmp_path: Path) -> None:
    io = checkpoint_io(how, tmp_path)
    before = tmp_path / "before.ckpt"
    io.save_checkpoint({"w": torch.zeros(9), "global_step": 1}, before)
    weights, path = Model().state_dict(), str(tmp_path / "made/.temp.ckpt")
    io.save_checkpoint(weights, path)
    # Another process loads it immediately.
    assert s4weights.inspect(path)["form"] == "tree"
    assert_identical(checkpoint_io(how, tmp_path).load_checkpoint(path), weights)
    io.remove_checkpoint(path)
    assert not os.path.exists(path)
    assert io.load_checkpoint(before)["global_step"] == 1
    # It is not what a later save falls back to.
    io.save_checkpoint({"w": torch.ones(9), "global_step": 2}, tmp_path / "after.ckpt")
    assert (io._running is None) == io.blocking
    io.teardown()


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
