"""torchtitan's checkpoint manager on two ranks: saved, killed, resumed. Run by
``cargo xtask test --adapters``.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from compare import assert_identical
from harness import die, run_guide, run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None, reason="needs torchtitan"
)

STEPS = 6
HOW = ["disabled", "async"]


class Counter:
    """In place of torchtitan's trainer, whose step is part of a checkpoint, too."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


class Data:
    """A data loader: its state is pickled bytes."""

    def __init__(self) -> None:
        self.made = torch.Generator().manual_seed(5)

    def next(self) -> torch.Tensor:
        return torch.randn(4, 32, generator=self.made)

    def state_dict(self) -> dict[str, Any]:
        return {"dp_rank_0": bytes(self.made.get_state().numpy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.made.set_state(torch.frombuffer(bytearray(state["dp_rank_0"]), dtype=torch.uint8))


class Run:
    def __init__(self, folder: str, config: Any) -> None:
        from torch.distributed.fsdp import fully_shard
        from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
        from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer

        torch.manual_seed(2)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)
        )
        fully_shard(self.model)
        groups = [
            ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2})
        ]
        self.optimizers = OptimizersContainer(
            OptimizersContainer.Config(implementation="for-loop", param_groups=groups),
            model_parts=[self.model],
        )
        self.schedulers = LRSchedulersContainer(self.optimizers, lambda step: 1 / (1 + step))
        self.counter, self.data = Counter(), Data()
        self.manager = config.build(
            dataloader=self.data,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.counter},
            sd_adapter=None,
            base_folder=folder,
        )

    def train(self, steps: int, die_at: int = 0) -> None:
        while self.counter.step < steps:
            x = self.data.next()
            self.optimizers.zero_grad()
            (self.model(x) - x).square().mean().backward()
            self.optimizers.step()
            self.schedulers.step()
            self.counter.step += 1
            if die_at == self.counter.step and torch.distributed.get_rank() == 1:
                die()
            self.manager.maybe_wait_for_staging()
            self.manager.save(self.counter.step, last_step=self.counter.step == STEPS)

    def state(self) -> dict[str, Any]:
        states = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizers.state_dict(),
            "scheduler": self.schedulers.state_dict(),
            "data": self.data.state_dict(),
        }
        for part in ("model", "optimizer"):
            states[part] = {
                k: v.to_local() if hasattr(v, "to_local") else v for k, v in states[part].items()
            }
        return states


def start() -> None:
    torch.distributed.init_process_group("gloo")


def manager_config(how: str, **others: Any) -> Any:
    from s4weights.adapters.torchtitan import StoreCheckpointManager

    return StoreCheckpointManager.Config(
        enable=True, interval=2, async_mode=how, last_save_model_only=False, **others
    )


def train(folder: str, how: str, die_at: str, out: str) -> None:
    start()
    run = Run(folder, manager_config(how, keep_latest_k=2))
    loaded = run.manager.load()
    assert loaded == (run.counter.step > 0)
    Path(folder, f"from-{torch.distributed.get_rank()}").write_text(str(run.counter.step))
    run.train(STEPS, int(die_at))
    run.manager.maybe_wait_for_saving()
    torch.save(run.state(), f"{out}-{torch.distributed.get_rank()}.pt")
    run.manager.close()
    torch.distributed.destroy_process_group()


def guide(folder: str) -> None:
    os.chdir(folder)
    start()
    names = run_guide("torchtitan.md", {})
    run = Run(folder, names["checkpoint"])
    assert not run.manager.load()
    run.train(3)
    run.manager.maybe_wait_for_saving()
    assert run.manager._store.latest() == 2
    again = Run(folder, names["checkpoint"])
    assert again.manager.load(2) and again.counter.step == 2
    with pytest.raises(FileNotFoundError):
        again.manager.load(1)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("whole")
    out = str(folder / "out")
    assert run_ranks(2, "test_torchtitan", "train", str(folder), "disabled", "0", out) == [0, 0]
    return out


@pytest.mark.parametrize("how", HOW)
def test_a_killed_run_resumes_to_the_same_bits(
    how: str, tmp_path: Path, uninterrupted: str
) -> None:
    folder, out = tmp_path, str(tmp_path / "out")
    codes = run_ranks(2, "test_torchtitan", "train", str(folder), how, "5", out)
    assert codes[1] == -signal.SIGKILL and codes[0] != 0
    assert run_ranks(2, "test_torchtitan", "train", str(folder), how, "0", out) == [0, 0]
    began = {int((folder / f"from-{rank}").read_text()) for rank in (0, 1)}
    # The save of step 4 may not have been finished.
    assert began == {4} or (how != "disabled" and began == {2})
    for rank in (0, 1):
        paths = [f"{path}-{rank}.pt" for path in (out, uninterrupted)]
        assert_identical(*(torch.load(path, weights_only=False) for path in paths))
    store = s4weights.CheckpointStore(folder / "checkpoint")
    assert [entry.step for entry in store.list()][-2:] == [4, 6]
    assert store.verify()["clean"]


def test_the_guide(tmp_path: Path) -> None:
    assert run_ranks(1, "test_torchtitan", "guide", str(tmp_path)) == [0]
