"""DeepSpeed's engine on two ranks: saved, killed, resumed. Run by ``cargo xtask test --adapters``."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from compare import assert_identical
from harness import die, run_guide, run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"
)

STEPS = 6


def engine_of() -> Any:
    """An engine that shards optimizer states and gradients (ZeRO 2), on the CPU."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    # Keeps what DeepSpeed compiles at the first start in the Python environment.
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(sys.prefix, "torch_extensions"))
    import deepspeed

    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
    }
    parameters = model.parameters()
    return deepspeed.initialize(model=model, model_parameters=parameters, config=config)[0]


def step(engine: Any, number: int) -> None:
    made = torch.Generator().manual_seed(10 * number + engine.global_rank)
    x = torch.randn(4, 32, generator=made).to(torch.bfloat16)
    engine.backward((engine(x) - x).float().square().mean())
    engine.step()


def train(folder: str, how: str, trouble: str = "") -> None:
    """Trains, from ``latest`` if there is one. ``trouble``: rank 1 dies or fails saving step 4."""
    from s4weights.adapters.deepspeed import use_s4weights

    engine = engine_of()
    first = 0
    if how != "torch":
        ours = use_s4weights(engine, blocking=how != "background")
        _, client = engine.load_checkpoint(folder)
        first = 0 if client is None else client["step"]
        save = ours.save

        def save_or_not(state_dict: Any, path: str) -> None:
            if trouble and number == 4 and engine.global_rank == 1 and "optim_states" in path:
                if trouble == "killed":
                    die()
                path = os.path.join(path, "in no folder", "file")
            save(state_dict, path)

        ours.save = save_or_not
    for number in range(first + 1, STEPS + 1):
        step(engine, number)
        if number % 2 == 0 and how != "torch":
            engine.save_checkpoint(folder, client_state={"step": number})
    engine.save_checkpoint(os.path.join(folder, "end"))


def fail(folder: str, how: str) -> None:
    with pytest.raises(s4weights.S4Error, match="global_step4: not saved by rank 1: "):
        train(folder, how, "failed")


def export(folder: str) -> None:
    from s4weights.adapters.deepspeed import use_s4weights

    engine = engine_of()
    use_s4weights(engine, blocking=False)
    step(engine, 1)
    engine.save_checkpoint(folder)
    engine.save_16bit_model(os.path.join(folder, "export"))
    assert Path(folder, "latest").read_text() == "global_step1"
    assert not Path(folder, "export", "latest").exists()
    engine.save_checkpoint(folder, tag="a", save_latest=False)
    engine.save_checkpoint(folder, tag="b")
    assert Path(folder, "latest").read_text() == "global_step1"
    engine.save_checkpoint(folder, tag="c")
    assert Path(folder, "latest").read_text() == "b"
    step(engine, 2)
    assert Path(folder, "latest").read_text() == "c"


def guide(folder: str) -> None:
    os.chdir(folder)
    engine = engine_of()
    names = {"engine": engine, "train_one_step": lambda: step(engine, 1)}
    weights = run_guide("deepspeed.md", names)["weights"]
    assert all(weights[name].dtype == torch.float32 for name in ("0.weight", "2.bias"))


def end(folder: Path) -> dict[str, Any]:
    files = sorted((folder / "end").glob("global_step*/*.pt"))
    return {path.name: s4weights.load(path, weights_only=False) for path in files}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole")
    assert run_ranks(2, "test_deepspeed", "train", str(folder), "torch") == [0, 0]
    return end(folder)


@pytest.mark.parametrize("how", ["blocking", "background"])
def test_a_killed_run_resumes_to_the_same_bits(
    how: str, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    killed = tmp_path
    codes = run_ranks(2, "test_deepspeed", "train", str(killed), how, "killed")
    assert codes[1] == -signal.SIGKILL and codes[0] != 0
    assert (killed / "latest").read_text() == "global_step2"
    weights = killed / "global_step2/mp_rank_00_model_states.pt"
    assert s4weights.verify(weights)["tensors"] > 0
    assert run_ranks(2, "test_deepspeed", "train", str(killed), how) == [0, 0]
    ours = end(killed)
    assert ours.keys() == uninterrupted.keys() and len(ours) == 3
    for name in ours:
        assert_identical(ours[name], uninterrupted[name])


@pytest.mark.parametrize("how", ["blocking", "background"])
def test_what_fails_in_one_rank_fails_in_all(how: str, tmp_path: Path) -> None:
    assert run_ranks(2, "test_deepspeed", "fail", str(tmp_path), how) == [0, 0]
    assert (tmp_path / "latest").read_text() == "global_step2"


def test_a_save_before_the_boundary_writes_latest_as_well(tmp_path: Path) -> None:
    assert run_ranks(1, "test_deepspeed", "export", str(tmp_path)) == [0]


def test_the_guide(tmp_path: Path) -> None:
    assert run_ranks(1, "test_deepspeed", "guide", str(tmp_path)) == [0]
    assert (tmp_path / "checkpoints/latest").exists()
