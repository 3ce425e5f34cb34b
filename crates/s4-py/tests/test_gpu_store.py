"""Checkpoints of tensors on CUDA devices. Skipped if there is none, or an error if
``S4_REQUIRE_GPU=1``.
"""

from __future__ import annotations

import copy
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from compare import TOO_LONG, assert_identical
from s4weights import CheckpointStore, _core, _device

if os.environ.get("S4_REQUIRE_GPU") != "1" and not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


@pytest.fixture(autouse=True)
def no_fallback(recwarn: pytest.WarningsRecorder) -> Any:
    """Nothing goes through the host unnoticed."""
    yield
    assert not [w for w in recwarn if "host memory" in str(w.message)]


@pytest.fixture
def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values on a GPU are not copied to the host by Python."""

    copy = torch.UntypedStorage.cpu

    def cpu(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if storage.device.type == "cpu":
            return copy(storage)
        raise AssertionError(f"{storage.nbytes()} bytes are copied to the host")

    monkeypatch.setattr(torch.UntypedStorage, "cpu", cpu)


def training(n: int = 1 << 20, device: str = "cuda") -> dict[str, Any]:
    """The state of a training run."""
    generator = torch.Generator(device).manual_seed(n)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(n, device=device, generator=generator) * scale

    return {
        "model": {"w": normal(0.02).bfloat16(), "norm": torch.ones(64, device=device)},
        "optimizer": {
            "master": normal(0.02),
            "m": normal(1e-4),
            "v": normal(1e-4).square(),
            "step": torch.zeros((), device=device),
            "ids": torch.arange(9000, device=device),
        },
        "host": torch.arange(20_000.0) * 0.37,
        "epoch": 3,
    }


def train(state: dict[str, Any]) -> None:
    """A step: all values change a little, in place."""
    for group in (state["model"], state["optimizer"]):
        for tensor in group.values():
            if tensor.dtype.is_floating_point and tensor.numel() > 64:
                tensor.mul_(1 + 2**-10 * torch.rand_like(tensor).gt(0.5))
    state["optimizer"]["step"] += 1
    state["optimizer"]["ids"][::100] += 1
    state["host"][::3] *= 1.001
    state["epoch"] += 1


def copy_of(state: Any) -> Any:
    """The same values in other memory."""
    if isinstance(state, dict):
        return {name: copy_of(value) for name, value in state.items()}
    return state.clone() if isinstance(state, torch.Tensor) else state


@pytest.mark.parametrize("parent_memory", [1 << 30, 3 << 20, 0])
def test_saves_and_loads_where_the_tensors_are(
    parent_memory: int, tmp_path: Path, no_copies: None
) -> None:
    engine = _device.Compute("cuda", None).engine({0})
    assert engine is not None
    state, steps = training(), []
    before = engine.chunks()
    with CheckpointStore(tmp_path, device="cuda", parent_memory=parent_memory) as store:
        for step in range(4):
            entry = store.save_checkpoint(state, step)
            assert (entry.kind == "delta") == (step > 0), entry
            steps.append(copy_of(state))
            train(state)
        done, host, refused = (a - b for a, b in zip(engine.chunks(), before, strict=True))
        # The host encodes differences of integers with Zstandard, if that is smaller.
        assert done > 4 * 50 and host <= 4 and refused == 0, (done, host, refused)
        before = engine.chunks()
        for step, expected in enumerate(steps):
            assert_identical(expected, store.load_checkpoint(step))
            assert_identical(expected, store.load_checkpoint(step, map_location="cuda:0") | {
                "host": expected["host"]
            })
        done, host, refused = (a - b for a, b in zip(engine.chunks(), before, strict=True))
        assert done > 8 * 50 and refused == 0, (done, host, refused)
        assert store.verify()["clean"]
    with CheckpointStore(tmp_path, device="cpu") as store:
        for step, expected in enumerate(steps):
            assert_identical(expected, store.load_checkpoint(step))


def test_the_same_bytes_as_from_the_host(tmp_path: Path) -> None:
    state = training(300_001)
    stores = [CheckpointStore(tmp_path / d, device=d) for d in ("cuda", "cpu")]
    for step in range(4):
        entries = [store.save_checkpoint(state, step) for store in stores]
        assert entries[0].report["digest"] == entries[1].report["digest"]
        assert entries[0].kind == entries[1].kind
        train(state)
    for store in stores:
        store.close()


def test_a_snapshot_is_the_state_at_the_call(tmp_path: Path, no_copies: None) -> None:
    state, steps = training(1 << 22), []
    stream = torch.cuda.Stream()
    with CheckpointStore(tmp_path, device="cuda") as store, torch.cuda.stream(stream):
        for step in range(4):
            # Work that is queued on the caller's stream belongs to the state.
            torch.cuda._sleep(100_000_000)
            train(state)
            pending = store.save_checkpoint(state, step, blocking=False)
            assert pending.staged.done()
            steps.append(copy_of(state))
            for group in (state["model"], state["optimizer"]):
                for tensor in group.values():
                    tensor.zero_()  # The caller goes on at once.
            state["host"].zero_()
            state = copy_of(steps[-1])
        assert pending.wait().kind == "delta"
        for step, expected in enumerate(steps):
            assert_identical(expected, store.load_checkpoint(step))


def test_an_error_before_the_snapshot_is_raised(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, device="cuda") as store:
        pending = store.save_checkpoint(training(), 0, TOO_LONG, blocking=False)
        assert pending.staged.done()
        with pytest.raises(s4weights.LimitError, match="log entry"):
            pending.wait()
        assert store.save_checkpoint(training(), 1).kind == "base"


def test_host_and_device_take_turns(tmp_path: Path) -> None:
    state, steps = training(), []
    for step, device in enumerate(["cpu", "cuda", "cuda", "cpu"]):
        with CheckpointStore(tmp_path, device=device) as store:
            blocking = step % 2 == 0
            saved = store.save_checkpoint(state, step, blocking=blocking)  # type: ignore[call-overload]
            entry = saved if blocking else saved.wait()
            assert (entry.kind == "delta") == (step > 0)
            steps.append(copy_of(state))
            assert_identical(state, store.load_checkpoint())
        train(state)
    with CheckpointStore(tmp_path) as store:
        assert_identical(steps[2], store.load_checkpoint(2))


def test_nothing_is_left_allocated(tmp_path: Path) -> None:
    state = training(1 << 22)
    with CheckpointStore(tmp_path, device="cuda") as store:
        store.save_checkpoint(state, 0)
        store.save_checkpoint(state, 1, blocking=False).wait()
        del (loaded := [store.load_checkpoint()])[:]
        gc.collect()  # What other tests left is not counted.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
        for step in range(2, 5):
            train(state)
            store.save_checkpoint(state, step)
            store.save_checkpoint(state, step + 10, blocking=False).wait()
            del (loaded := [store.load_checkpoint()])[:]
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before[1]
        torch.cuda.empty_cache()
        assert torch.cuda.mem_get_info()[0] >= before[0]
        assert not loaded


def test_steps_of_sgd_take_next_to_nothing(tmp_path: Path) -> None:
    torch.manual_seed(3)
    layer = torch.nn.Linear(1000, 600, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.03, momentum=0.9, weight_decay=0.01)
    states, entries = [], []
    with CheckpointStore(tmp_path / "store") as store:
        for step in range(4):
            layer(torch.randn(16, 1000, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state = {"model": layer.state_dict(), "optimizer": optimizer.state_dict()}
            entries.append(store.save_checkpoint(state, step))
            states.append(copy.deepcopy(state))
        for step, state in enumerate(states):
            assert_identical(store.load_checkpoint(step, map_location="cuda"), state)
    # Hardly more than the momentum. The others' parents are more than a step older.
    assert entries[1].bytes < 4 * 1000 * 600


def test_damage_of_a_parent_is_named(tmp_path: Path) -> None:
    state = training()
    with CheckpointStore(tmp_path, device="cuda") as store:
        store.save_checkpoint(state, 0)
        train(state)
        assert store.save_checkpoint(state, 1).kind == "delta"
    largest = max((p for p in tmp_path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.chmod(0o644)
    largest.write_bytes(data)
    store = CheckpointStore(tmp_path, device="cuda")
    with store, pytest.raises(s4weights.CorruptDataError):
        store.load_checkpoint(1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_tensors_of_several_devices(tmp_path: Path, no_copies: None) -> None:
    count = torch.cuda.device_count()
    state = {f"rank{i}": training(1 << 21, f"cuda:{i}") for i in range(count)}
    steps = []
    with CheckpointStore(tmp_path / "store", device="cuda") as store:
        for step in range(4):
            for i in range(count):
                with torch.cuda.device(i):
                    train(state[f"rank{i}"])
            saved = store.save_checkpoint(state, step, blocking=step % 2 == 0)  # type: ignore[call-overload]
            entry = saved if step % 2 == 0 else saved.wait()
            assert (entry.kind == "delta") == (step > 0)
            steps.append(copy_of(state))
        for step, expected in enumerate(steps):
            assert_identical(expected, store.load_checkpoint(step))
        other = store.load_checkpoint(3, map_location={"cuda:0": "cuda:1", "cuda:1": "cuda:0"})
        for name in ("rank0", "rank1"):
            moved, where = other[name]["model"]["w"], state[name]["model"]["w"].device.index
            assert moved.device.index == 1 - where
            assert moved.cpu().equal(steps[3][name]["model"]["w"].cpu())
    path = tmp_path / "file.s4w"
    s4weights.save(state, path, device="cuda")
    assert_identical(state, s4weights.load(path))
    for i in range(count):
        engine = _device.Compute("cuda", None).engine({i})
        assert isinstance(engine, _core.CudaEngine) and engine.scratch_high_water(i) > 0
