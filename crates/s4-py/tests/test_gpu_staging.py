"""Background saves of tensors on CUDA devices, under attack: while a save goes on, values are
changed from any stream, or freed and their memory used again. Every checkpoint is compared bit for
bit.

Skipped if there is no device, or an error if ``S4_REQUIRE_GPU=1``. ``S4_STAGING_SAVES`` sets the
number of saves of the long test (200).
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from compare import assert_identical
from s4weights import CheckpointStore, LimitError

if os.environ.get("S4_REQUIRE_GPU") != "1" and not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

SAVES = int(os.environ.get("S4_STAGING_SAVES", "200"))
STAGES = ["device", "host", "lazy"]
#: Cycles that keep a stream busy for some tens of milliseconds.
BUSY = 50_000_000


def state(n: int = 1 << 20, seed: int = 0) -> dict[str, Any]:
    """Tensors of all sizes, on the device and in host memory."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(n: int, scale: float) -> torch.Tensor:
        return torch.randn(n, device="cuda", generator=generator) * scale

    master = normal(n, 0.02)
    return {
        "w": master.bfloat16(),
        "master": master,
        "m": normal(n, 1e-4),
        "v": normal(n, 1e-4).square(),
        "large": normal(n + (1 << 20), 0.02),
        "view": master[100:200],
        "odd": normal(70_001, 1.0).to(torch.uint8),
        "small": [normal(i, 1.0) for i in range(1, 400, 7)],
        "empty": torch.empty(0, device="cuda"),
        "step": torch.zeros(()),
        "host": torch.arange(50_000.0),
    }


def tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, dict):
        return [t for value in values.values() for t in tensors(value)]
    if isinstance(values, list):
        return [t for value in values for t in tensors(value)]
    return [values] if isinstance(values, torch.Tensor) else []


def on_host(values: Any, memory: dict[int, torch.UntypedStorage] | None = None) -> Any:
    """The same values in host memory, where tensors share storages as before."""
    memory = {} if memory is None else memory
    if isinstance(values, dict):
        return {name: on_host(value, memory) for name, value in values.items()}
    if isinstance(values, list):
        return [on_host(value, memory) for value in values]
    if not isinstance(values, torch.Tensor):
        return values
    storage = values.untyped_storage()
    if storage._cdata not in memory:
        memory[storage._cdata] = storage.cpu().clone() if storage.nbytes() else storage.cpu()
    out = torch.empty(0, dtype=values.dtype)
    place = (values.storage_offset(), values.shape, values.stride())
    return out.set_(memory[storage._cdata], *place)


def train(values: Any) -> None:
    """A small step in place, on the current stream."""
    for tensor in tensors(values):
        if tensor.dtype.is_floating_point and tensor.numel() > 1000:
            tensor.view(-1)[::7].mul_(1 + 2**-9)


def spoil(values: Any) -> None:
    for tensor in tensors(values):
        tensor.zero_() if tensor.numel() % 2 else tensor.fill_(77)


def assert_stored(expected: Any, store: CheckpointStore, step: int) -> None:
    assert_identical(expected, store.load_checkpoint(step, map_location="cpu"))


@pytest.mark.parametrize("pinned", [0, 1 << 30])
def test_page_locked_memory_is_used_again_and_given_back(tmp_path: Path, pinned: int) -> None:
    def memory() -> tuple[int, int, int, int]:
        while any(thread.name == "s4weights-pinned" for thread in threading.enumerate()):
            time.sleep(0.001)
        return s4weights._device._engine(s4weights._device.GPU_SCRATCH).frame_memory()

    values = state()
    expected = {}
    with CheckpointStore(tmp_path / "store", device="cuda", pinned_memory=pinned) as store:
        pieces, before = [], memory()[3]  # Earlier tests took some, too.
        for step in range(5):
            expected[step] = on_host(values)
            store.save_checkpoint(values, step, blocking=False, stage="host").wait()
            taken, idle, budget, count = memory()
            assert taken == idle <= budget == pinned
            pieces.append(count - before)
            train(values)
        for step, stored in expected.items():
            assert_stored(stored, store, step)
        # The first save leaves enough pieces for the next one, however slowly objects are stored.
        assert pieces[4] == pieces[0] and (pieces[0] > 0) == (pinned > 0)
        path = tmp_path / "file.s4w"
        pending = s4weights.save(values, path, device="cuda", blocking=False, stage="host")
        stored = on_host(values)
        pending.wait_staged()
        spoil(values)
        pending.wait()
        assert_identical(stored, s4weights.load(path, map_location="cpu"))
    assert memory()[:2] == (0, 0)
    s4weights._device._engine(s4weights._device.GPU_SCRATCH).limit_frame_memory(4 << 30)


@pytest.mark.parametrize("stage", ["auto", *STAGES])
def test_a_long_run(stage: Any, tmp_path: Path) -> None:
    """Saves during training, bases and deltas, each guarded as its way of staging requires."""
    values = state(1 << 18)
    parameters = [t for t in tensors(values) if t.is_cuda and t.dtype == torch.float32]
    optimizer = torch.optim.AdamW([torch.nn.Parameter(p) for p in parameters[:4]], lr=1e-3)
    stages, pending = set(), None
    with CheckpointStore(tmp_path, device="cuda", retention=40) as store:
        expected: dict[int, Any] = {}
        for step in range(SAVES):
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = torch.randn_like(parameter) * 1e-3
            optimizer.step()  # Changes the very tensors that the last save stores.
            if stage != "lazy" or pending is None or pending.staged.done():
                train(values)
            expected[step] = on_host(values)
            pending = store.save_checkpoint(
                values, step, blocking=False, stage=stage, base=step % 50 == 0
            )
            pending.guard(optimizer)
            stages.add(pending.stage)
            if stage == "lazy":
                # Forward and backward passes run meanwhile.
                torch.mm(torch.randn(512, 512, device="cuda"), torch.randn(512, 512, device="cuda"))
            if step % 20 == 19:
                pending.wait(120)
                for entry in store.list():
                    if entry.step in expected:
                        assert_stored(expected.pop(entry.step), store, entry.step)
                expected.clear()
        assert store.verify()["clean"]
    assert stages == {"device" if stage == "auto" else stage}


@pytest.mark.parametrize("stage", ["device", "host"])
def test_values_overwritten_at_once_on_the_same_stream(stage: Any, tmp_path: Path) -> None:
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        values = state(1 << 22)
        torch.cuda.synchronize()
        folder = tmp_path / str(stream.cuda_stream)
        with CheckpointStore(folder, device="cuda") as store, torch.cuda.stream(stream):
            expected = []
            for step in range(10):
                train(values)
                expected.append(on_host(values))
                backup = [t.clone() for t in tensors(values)]
                # Work queued before the call belongs to the state; later work does not.
                torch.cuda._sleep(BUSY)
                for tensor, kept in zip(tensors(values), backup, strict=True):
                    tensor.zero_()
                    tensor.copy_(kept)
                pending = store.save_checkpoint(values, step, blocking=False, stage=stage)
                assert pending.staged.done() and pending.stage == stage
                spoil(values)
                for tensor, kept in zip(tensors(values), backup, strict=True):
                    tensor.copy_(kept)
            pending.wait(120)
            for step, old in enumerate(expected):
                assert_stored(old, store, step)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["wait_staged", "wait_stream", "guard"])
def test_values_overwritten_on_another_stream(stage: Any, how: str, tmp_path: Path) -> None:
    if (stage, how) == ("lazy", "wait_stream"):
        pytest.skip("reads of a lazy save are on no stream of the caller's")
    values, other = state(1 << 22), torch.cuda.Stream()
    torch.cuda.synchronize()
    with CheckpointStore(tmp_path, device="cuda") as store:
        expected = []
        for step in range(20):
            train(values)
            expected.append(on_host(values))
            backup = [t.clone() for t in tensors(values)]
            torch.cuda.synchronize()
            torch.cuda._sleep(BUSY)  # The copies are queued behind it.
            pending = store.save_checkpoint(values, step, blocking=False, stage=stage)
            if how == "wait_stream":
                other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                if how == "wait_staged":
                    pending.wait_staged()
                elif how == "guard":
                    with pending.guard():
                        pass
                spoil(values)
                for tensor, kept in zip(tensors(values), backup, strict=True):
                    tensor.copy_(kept)
            torch.cuda.current_stream().wait_stream(other)
            if step % 5 == 4:
                pending.wait(120)
        for step, old in enumerate(expected):
            assert_stored(old, store, step)


@pytest.mark.parametrize("stage", STAGES)
def test_freed_memory_that_is_used_again(stage: Any, tmp_path: Path) -> None:
    """The caching allocator reuses it at once, on the stream of the allocation and on others."""
    made_on = torch.cuda.Stream()
    with CheckpointStore(tmp_path, device="cuda") as store:
        expected = []
        for step in range(20):
            with torch.cuda.stream(made_on):
                values = state(1 << 20, seed=step)
            torch.cuda.current_stream().wait_stream(made_on)
            expected.append(on_host(values))
            sizes = [t.numel() * t.element_size() for t in tensors(values) if t.is_cuda]
            torch.cuda._sleep(BUSY)
            pending = store.save_checkpoint(values, step, blocking=False, stage=stage)
            del values
            for stream in (made_on, torch.cuda.current_stream()):
                with torch.cuda.stream(stream):
                    again = [
                        torch.full((n,), 170, dtype=torch.uint8, device="cuda") for n in sizes
                    ]
            del again
        pending.wait(120)
        for step, old in enumerate(expected):
            assert_stored(old, store, step)


EXPANDABLE = """
import sys, torch
sys.path.insert(0, sys.argv[2])
import test_gpu_staging as own
from s4weights import CheckpointStore
from pathlib import Path
own.test_freed_memory_that_is_used_again(sys.argv[1], Path(sys.argv[3]) / "freed")
own.test_values_overwritten_on_another_stream(sys.argv[1], "wait_staged", Path(sys.argv[3]) / "other")
"""


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("config", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_other_allocators(stage: str, config: str, tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", EXPANDABLE, stage, here, str(tmp_path)],
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": config, "PYTORCH_ALLOC_CONF": config},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_the_call_does_not_wait_for_the_device(tmp_path: Path) -> None:
    values = state(1 << 22)
    with CheckpointStore(tmp_path, device="cuda") as store:
        store.save_checkpoint(values, 0, blocking=False, stage="device").wait()
        for stage in ("device", "lazy"):
            torch.cuda.synchronize()
            torch.cuda._sleep(2_000_000_000)  # About a second.
            start = time.perf_counter()
            pending = store.save_checkpoint(values, 1, blocking=False, stage=stage)  # type: ignore[call-overload]
            seconds = time.perf_counter() - start
            busy = not torch.cuda.current_stream().query()
            assert seconds < 0.3, (stage, seconds)
            assert busy, f"{stage}: the stream was not kept busy"
            pending.wait(60)


def test_a_guard_in_device_mode_does_not_wait_on_the_host(tmp_path: Path) -> None:
    values = state(1 << 20)
    parameter = torch.nn.Parameter(values["master"])
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # The first use of a kernel loads it, which may wait for the device.
    expected = on_host(values)
    with CheckpointStore(tmp_path, device="cuda") as store:
        torch.cuda._sleep(2_000_000_000)
        pending = store.save_checkpoint(values, 0, blocking=False, stage="device")
        pending.guard(optimizer)
        start = time.perf_counter()
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            optimizer.step()
        assert time.perf_counter() - start < 0.3
        torch.cuda.current_stream().wait_stream(other)
        pending.wait(60)
        assert_stored(expected, store, 0)
    assert not torch.equal(values["master"].cpu(), expected["master"])


def test_memory_of_the_device_goes_back(tmp_path: Path) -> None:
    values = state(1 << 23)
    with CheckpointStore(tmp_path, device="cuda") as store:
        for step in range(2):
            store.save_checkpoint(values, step, blocking=False, stage="device").wait()
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
        for step in range(2, 6):
            train(values)
            store.save_checkpoint(values, step, blocking=False, stage="device").wait()
        torch.cuda.synchronize()
        after = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
        assert after[0] >= before[0] and after[1] == before[1]


def test_without_room_it_goes_through_the_host_or_says_how_much_it_needs(tmp_path: Path) -> None:
    values = state(1 << 22)
    nbytes = sum(t.untyped_storage().nbytes() for t in tensors(values) if t.is_cuda)
    free = torch.cuda.mem_get_info()[0]
    with CheckpointStore(tmp_path, device="cuda", device_reserve=free) as store:
        pending = store.save_checkpoint(values, 0, blocking=False)
        assert pending.stage == "host" and pending.staged.done()
        expected = on_host(values)
        spoil(values)
        pending.wait(60)
        with pytest.raises(LimitError, match='stage="device"') as caught:
            store.save_checkpoint(values, 1, blocking=False, stage="device")
        needed = [int(word) for word in str(caught.value).split() if word.isdigit()]
        assert any(n >= nbytes // 2 for n in needed), caught.value
        assert_stored(expected, store, 0)
        assert store.save_checkpoint(values, 2).step == 2


def test_training_that_fills_the_device_does_not_run_out(tmp_path: Path) -> None:
    """PyTorch's own memory is not touched: it can get again what it had at its peak."""
    values = state(1 << 22)
    reserve = torch.cuda.mem_get_info()[1] // 10
    room = torch.cuda.mem_get_info()[0] - reserve // 2
    with CheckpointStore(tmp_path, device="cuda") as store:
        for step in range(6):
            work = torch.empty(room, dtype=torch.uint8, device="cuda")
            work[::4096] = 1
            del work
            if step % 2:
                torch.cuda.empty_cache()
            train(values)
            expected = on_host(values)
            pending = store.save_checkpoint(values, step, blocking=False)
            assert pending.stage == "host"
            work = torch.empty(room, dtype=torch.uint8, device="cuda")
            del work
            pending.wait(60)
            assert_stored(expected, store, step)
    torch.cuda.empty_cache()
    # Saves of other tests need not leave as much free.
    torch.cuda.reset_peak_memory_stats()


@pytest.mark.parametrize("stage", ["auto", *STAGES])
def test_files(stage: Any, tmp_path: Path) -> None:
    values = state(1 << 22)
    s4weights.save(values, tmp_path / "blocking.s4w", device="cuda")
    for i in range(5):
        expected = on_host(values)
        path = tmp_path / f"{i}.s4w"
        torch.cuda._sleep(BUSY)
        pending = s4weights.save(values, path, blocking=False, stage=stage, device="cuda")
        if stage == "lazy":
            pending.wait_staged()
        spoil(values)
        report = pending.wait(60)
        assert report["bytes_out"] == path.stat().st_size
        assert_identical(expected, s4weights.load(path, map_location="cpu"))
        values = state(1 << 22, seed=i)
    assert (tmp_path / "0.s4w").read_bytes() == (tmp_path / "blocking.s4w").read_bytes()


def test_devices_through_the_host(tmp_path: Path) -> None:
    """Without the engine, every way of staging but `device` copies values to host memory."""
    values = state()
    with CheckpointStore(tmp_path, device="cpu") as store:
        for step, stage in enumerate(("auto", "host", "lazy")):
            expected = on_host(values)
            pending = store.save_checkpoint(values, step, blocking=False, stage=stage)  # type: ignore[call-overload]
            pending.wait_staged()
            spoil(values)
            pending.wait(60)
            assert_stored(expected, store, step)
            values = state(seed=step)
        with pytest.raises(s4weights.S4Error, match='stage="device"'):
            store.save_checkpoint(values, 9, blocking=False, stage="device")
