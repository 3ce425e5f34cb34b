"""torch_checkpointing's manager: saved, killed, resumed."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from compare import assert_identical
from harness import Layer, die, run_guide

pytest.importorskip("torch_checkpointing", reason="needs torch_checkpointing")

from torch_checkpointing.checkpoint_manager import CheckpointManager, ItemSpec
from torch_checkpointing.config import (
    AsyncCheckpointSaverConfig,
    CheckpointLoaderConfig,
    SyncCheckpointSaverConfig,
)
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from s4weights.adapters.torch_checkpointing import S4StorageConfig

STEPS = 6
HOW = ["mmap", "stream"]


def manager_of(how: str = "mmap", save: Any = None, storage: Any = None) -> Any:
    return CheckpointManager.Config(
        items={},
        default=ItemSpec(),
        save=save or SyncCheckpointSaverConfig(),
        load=CheckpointLoaderConfig(use_mmap=how == "mmap"),
        storage_config=storage or S4StorageConfig(preset="fast"),
    ).build()


class Run:
    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(Layer(32, 80), Layer(80, 32))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.done = 0
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "train": {"step": self.done, "random": torch.get_rng_state()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done = state["train"]["step"]
        torch.set_rng_state(state["train"]["random"])

    def step(self) -> None:
        x = torch.randn(5, 32)
        self.optimizer.zero_grad()
        (self.model(x) - x).square().mean().backward()
        self.optimizer.step()
        self.done += 1


def train(folder: Path, how: str, die_at: int = 0) -> dict[str, Any]:
    run, manager = Run(), manager_of(how)
    folder.mkdir(parents=True, exist_ok=True)
    steps = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]
    if steps:
        run.restore(manager.load(str(folder / str(max(steps))), into=run.state()))
        assert run.done == max(steps)
    while run.done < STEPS:
        run.step()
        if run.done == die_at:
            die()
        manager.save(str(folder / str(run.done)), run.state())
    manager.close()
    return run.state()


def victim(folder: str, how: str) -> None:
    train(Path(folder), how, die_at=4)


#: Runs that are killed, for the fixture `killed`.
VICTIMS = [(victim, how) for how in HOW]


@pytest.mark.parametrize("how", HOW)
def test_a_killed_run_resumes_to_the_same_bits(how: str, killed: Path, tmp_path: Path) -> None:
    folder = killed / "test_torch_checkpointing" / how
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "3"]
    kinds = [is_s4w(path) for path in (folder / "3").rglob("*") if path.is_file()]
    assert kinds.count(True) == 3  # The rest is metadata, which is JSON.
    assert_identical(train(folder, how), train(tmp_path, how))


def is_s4w(path: Path) -> bool:
    try:
        return bool(s4weights.inspect(path)["tensors"] is not None)
    except s4weights.UnsupportedFormatError:
        return False


def test_what_its_own_storage_wrote_is_read(tmp_path: Path) -> None:
    run = Run()
    theirs = manager_of(storage=LocalFileSystemStorageConfig(use_direct_io=False))
    theirs.save(str(tmp_path / "1"), run.state())
    before = run.state()
    loaded = manager_of().load(str(tmp_path / "1"), into=Run().state())
    assert_identical(loaded["model"], before["model"])
    theirs.close()


def test_objects_of_other_classes_are_refused(tmp_path: Path) -> None:
    storage = S4StorageConfig().create_storage()
    with storage.get_write_stream(tmp_path / "x", {"run": Run}) as stream:
        torch.save({"run": Run}, stream)
    with pytest.raises(s4weights.UnsafeLoadError, match="Run"):
        storage.stream_read(tmp_path / "x")
    trusting = S4StorageConfig(weights_only=False).create_storage()
    with trusting.stream_read(tmp_path / "x") as stream:
        assert torch.load(stream, weights_only=False) == {"run": Run}
    assert trusting.getsize(tmp_path / "x") != (tmp_path / "x").stat().st_size


def test_a_file_that_was_written_in_place_is_read_again(tmp_path: Path) -> None:
    storage, sizes = S4StorageConfig().create_storage(), set()
    file = tmp_path / "x"
    for seed in (1, 2):
        weight = torch.rand(5000, generator=torch.Generator().manual_seed(seed)).round()
        data = io.BytesIO()
        s4weights.save({"w": weight}, data)
        file.write_bytes(data.getvalue())
        os.utime(file, ns=(seed, seed))
        sizes.add(len(data.getvalue()))
        length = storage.getsize(file)
        with storage.stream_read(file) as stream:
            found = stream.read(length // 2)
        assert len(storage._kept) == seed, "it is kept until all of it was read"
    with storage.stream_read(file) as stream:
        assert stream.seek(len(found)) == len(found)
        found += stream.read()
    assert torch.equal(torch.load(io.BytesIO(found))["w"], weight)
    assert len(sizes) == 1 and len(storage._kept) == 1, "what was read is dropped"


def test_a_save_in_another_process(tmp_path: Path) -> None:
    assert pickle.loads(pickle.dumps(S4StorageConfig(preset="fast"))).preset == "fast"
    manager = manager_of(save=AsyncCheckpointSaverConfig())
    run = Run()
    manager.save(str(tmp_path / "1"), run.state())
    manager.close()
    assert sum(is_s4w(path) for path in (tmp_path / "1").rglob("*") if path.is_file()) == 3
    again = Run()
    again.step()
    again.restore(manager_of().load(str(tmp_path / "1"), into=again.state()))
    assert_identical(again.state(), run.state())


def test_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run()
    names = run_guide("torch_checkpointing.md", {"state": run.state()})
    assert_identical(names["loaded"]["model"], run.state()["model"])
