"""Ray Train: reported, killed, resumed. Run by ``cargo xtask test --adapters``."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from compare import assert_identical
from harness import PATHS, run_guide, run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray[train]")

STEPS = 5


class Run:
    def __init__(self) -> None:
        torch.manual_seed(2)
        self.model = torch.nn.Linear(60, 60)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.done = 0

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "done": self.done,
        }

    def load(self, file: Path) -> None:
        state = torch.load(file, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        self.done = state["done"]

    def step(self) -> None:
        x = torch.randn(4, 60)
        self.optimizer.zero_grad()
        (self.model(x) - x).square().mean().backward()
        self.optimizer.step()
        self.done += 1


def work(config: dict[str, Any]) -> None:
    """The work of a Ray worker. The first worker that reaches step 4 is killed."""
    import ray.train

    from s4weights.adapters.ray import StoreUpload, restored

    run, upload = Run(), StoreUpload(config["store"])
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with restored(checkpoint) as folder:
            run.load(folder / "state.pt")
        Path(config["marks"], "from").write_text(str(run.done))
    while run.done < STEPS:
        run.step()
        killed = Path(config["marks"], "killed")
        if run.done == 4 and config["kill"] and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), 9)
        with tempfile.TemporaryDirectory() as folder:
            torch.save(run.state(), Path(folder, "state.pt"))
            ray.train.report(
                {"done": run.done},
                checkpoint=ray.train.Checkpoint.from_directory(folder),
                checkpoint_upload_fn=upload,
            )


def train(folder: str, kill: str) -> None:
    os.environ.update(RAY_TRAIN_V2_ENABLED="1", RAY_AUTH_MODE="disabled", RAY_DEDUP_LOGS="0")
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "180"
    import ray
    import ray.train
    from ray.train.torch import TorchTrainer

    ray.init(
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(PATHS)}},
    )
    try:
        result = TorchTrainer(
            work,
            train_loop_config={"store": f"{folder}/store", "marks": folder, "kill": bool(kill)},
            scaling_config=ray.train.ScalingConfig(num_workers=1),
            run_config=ray.train.RunConfig(
                name="run",
                storage_path=f"{folder}/ray",
                failure_config=ray.train.FailureConfig(max_failures=1),
                checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            ),
        ).fit()
        assert result.metrics == {"done": STEPS}
        os.chdir(folder)
        run_guide("ray.md", {"checkpoint": result.checkpoint})
    finally:
        ray.shutdown()


def test_a_killed_worker_resumes_to_the_same_bits(tmp_path: Path) -> None:
    killed = tmp_path
    assert run_ranks(1, "test_ray", "train", str(killed), "kill") == [0]
    assert (killed / "killed").exists()
    # Ray may not have received the third report when the worker was killed.
    first = int((killed / "from").read_text())
    assert first in (2, 3)
    run = Run()
    while run.done < STEPS:
        run.step()
    store = s4weights.CheckpointStore(killed / "store/rank-0")
    entries = store.list()
    assert [entry.step for entry in entries] == [*range(1, 3 + STEPS - first + 1)]
    assert "delta" in {entry.kind for entry in entries}
    assert_identical(store.load_checkpoint()["state.pt"]["torch"], run.state())
    marks = sorted((killed / "ray/run").glob("*/s4weights-rank-0.json"))
    # Ray keeps small files that name checkpoints of the store. It does not remove one that it has
    # not received.
    assert len(marks) == 2 + (3 - first)
    ids = {json.loads(path.read_text())["s4weights"]["id"] for path in marks}
    assert {entry.id for entry in entries[-2:]} <= ids <= {entry.id for entry in entries}
