"""Background saves store the values at the call, with every way of staging."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import s4weights
from compare import TOO_LONG, assert_identical
from s4weights import CheckpointStore, LimitError, S4Error, _pending, _staging, _storages

STAGES = ["auto", "device", "host", "lazy"]


def state(n: int = 200_000) -> dict[str, Any]:
    """Tensors of all sizes, views and ties, and plain values."""
    w = torch.randn(n, generator=torch.Generator().manual_seed(n))
    return {
        "w": w,
        "bf16": w.bfloat16(),
        "view": w[10:20],
        "small": torch.arange(100),
        "none": torch.empty(0),
        "step": torch.zeros(()),
        "epoch": 3,
    }


def spoil(values: dict[str, Any]) -> None:
    """Changes some values of every tensor in place, in every chunk."""
    for tensor in values.values():
        if isinstance(tensor, torch.Tensor):
            tensor.reshape(-1)[::50] += 1


class Gate:
    """A progress function that holds up a save when all bytes are done but nothing is listed."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, done: int, total: int) -> None:
        if done == total:
            self.reached.set()
            assert self.open.wait(60)


def training() -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A model, its optimizer, and a function that computes gradients."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.Linear(300, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def backward() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()

    return model, optimizer, backward


@pytest.mark.parametrize("stage", ["auto", "device", "host"])
def test_the_caller_may_go_on_at_once(stage: Any, tmp_path: Path) -> None:
    values = state()
    with CheckpointStore(tmp_path) as store:
        expected = []
        for step in range(4):
            expected.append(copy.deepcopy(values))
            pending = store.save_checkpoint(values, step, blocking=False, stage=stage)
            assert pending.staged.done() and pending.stage in ("device", "host")
            pending.wait_staged()
            spoil(values)
        assert pending.wait(60).kind == "delta"
        for step, old in enumerate(expected):
            assert_identical(old, store.load_checkpoint(step))


def test_freed_tensors_are_kept_until_they_are_read(tmp_path: Path) -> None:
    gate, values = Gate(), state()
    expected = copy.deepcopy(values)
    with CheckpointStore(tmp_path) as store:
        pending = store.save_checkpoint(values, 0, blocking=False, stage="lazy", progress=gate)
        del values
        filled = [torch.full((200_000,), 7.0) for _ in range(20)]
        gate.open.set()
        pending.wait(60)
        assert_identical(expected, store.load_checkpoint())
        assert filled


def test_lazy_returns_before_values_are_read_and_the_guard_waits(tmp_path: Path) -> None:
    model, optimizer, backward = training()
    gate = Gate()
    with CheckpointStore(tmp_path) as store:
        backward()
        optimizer.step()
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        expected = copy.deepcopy(saved)
        pending = store.save_checkpoint(saved, 0, blocking=False, stage="lazy", progress=gate)
        assert pending.stage == "lazy"
        pending.guard(optimizer)
        backward()  # Gradients are not saved.
        assert gate.reached.wait(60)
        assert not pending.staged.done()
        with pytest.raises(TimeoutError):
            pending.wait_staged(0.05)
        stepped = threading.Event()

        def step() -> None:
            optimizer.step()
            stepped.set()

        thread = threading.Thread(target=step)
        thread.start()
        assert not stepped.wait(0.2)
        gate.open.set()
        thread.join(60)
        assert stepped.is_set() and pending.staged.done()
        assert not torch.equal(model[0].weight, expected["model"]["0.weight"])
        pending.wait(60)
        assert_identical(expected, store.load_checkpoint())
        # The guard is only for that save: this step does not wait.
        optimizer.step()


def test_every_checkpoint_of_a_guarded_run_is_exact(tmp_path: Path) -> None:
    model, optimizer, backward = training()
    expected, kinds = [], []
    with CheckpointStore(tmp_path) as store:
        for step in range(30):
            backward()
            optimizer.step()
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            expected.append(copy.deepcopy(saved))
            pending = store.save_checkpoint(saved, step, blocking=False, stage="lazy")
            if step % 3 == 0:
                pending.guard(optimizer)
            elif step % 3 == 1:
                with pending.guard():
                    pass
            else:
                pending.wait_staged(60)
            if step % 2:
                kinds.append(pending.wait(60).kind)
        assert "delta" in kinds
        for step, old in enumerate(expected):
            assert_identical(old, store.load_checkpoint(step))
        assert store.verify()["clean"]


@pytest.mark.parametrize("parent_memory", [0, 100_000, 1 << 30])
def test_deltas_are_taken_from_what_was_stored(parent_memory: int, tmp_path: Path) -> None:
    """Not from what the tensors became after they were staged."""
    values = state()
    with CheckpointStore(tmp_path, parent_memory=parent_memory) as store:
        expected = []
        for step in range(6):
            expected.append(copy.deepcopy(values))
            pending = store.save_checkpoint(values, step, blocking=False, stage="lazy")
            pending.wait_staged()
            spoil(values)
            assert pending.wait(60).kind == ("delta" if step else "base")
        for step, old in enumerate(expected):
            assert_identical(old, store.load_checkpoint(step))


def test_several_saves_and_optimizers_are_guarded(tmp_path: Path) -> None:
    runs = [training() for _ in range(2)]
    gates = [Gate(), Gate()]
    stores = [CheckpointStore(tmp_path / str(i)) for i in range(2)]
    pendings = [
        store.save_checkpoint(
            {"model": model.state_dict()}, 0, blocking=False, stage="lazy", progress=gate
        )
        for store, (model, _, _), gate in zip(stores, runs, gates, strict=True)
    ]
    for pending in pendings:
        pending.guard(*(optimizer for _, optimizer, _ in runs))
    for _, _, backward in runs:
        backward()
    done: list[int] = []

    def step() -> None:
        for i, (_, optimizer, _) in enumerate(runs):
            optimizer.step()
            done.append(i)

    thread = threading.Thread(target=step)
    thread.start()
    gates[1].open.set()
    pendings[1].wait(60)
    time.sleep(0.05)
    assert done == []
    gates[0].open.set()
    thread.join(60)
    assert done == [0, 1]
    for store in stores:
        store.close()


def test_other_hooks_of_an_optimizer_still_run(tmp_path: Path) -> None:
    _, optimizer, backward = training()
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    with CheckpointStore(tmp_path) as store:
        for step in range(3):
            pending = store.save_checkpoint(state(), step, blocking=False, stage="lazy")
            pending.guard(optimizer)
            if step == 0:
                optimizer.register_step_pre_hook(lambda *_: seen.append("after"))
            backward()
            optimizer.step()
            assert pending.staged.done()
    assert seen == ["before", "after"] * 3
    assert len(optimizer._optimizer_step_pre_hooks) == 3


def test_what_takes_no_hooks_is_refused(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        pending = store.save_checkpoint(state(), 0, blocking=False, stage="lazy")
        with pytest.raises(TypeError, match=r"pending\.guard\(\)"):
            pending.guard(SimpleOptimizer())


class SimpleOptimizer:
    """An optimizer that is not PyTorch's."""


@pytest.mark.parametrize("stage", STAGES)
def test_a_save_that_fails_holds_nobody_up(stage: Any, tmp_path: Path) -> None:
    _, optimizer, backward = training()
    with CheckpointStore(tmp_path) as store:
        bad = TOO_LONG
        pending = store.save_checkpoint(state(), 0, bad, blocking=False, stage=stage)
        pending.guard(optimizer)
        backward()
        optimizer.step()
        pending.wait_staged(60)
        with pytest.raises(s4weights.LimitError, match="log entry"):
            store.save_checkpoint(state(), 1)
        assert store.save_checkpoint(state(), 2).kind == "base"


def test_arguments_that_are_wrong_are_refused(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path / "store") as store:
        for stage in ("", "gpu", None, 1):
            with pytest.raises(ValueError, match="stage"):
                store.save_checkpoint({}, 0, blocking=False, stage=stage)  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="blocking=False"):
            store.save_checkpoint({}, 0, stage="lazy")
    for name in ("staging_memory", "device_reserve"):
        for value in (-1, 1.5, "1", True):
            with pytest.raises(ValueError, match=name):
                CheckpointStore(tmp_path / "store", **{name: value})  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=name):
                s4weights.save({}, tmp_path / "x.s4w", **{name: value})  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="blocking=False"):
        s4weights.save({}, tmp_path / "x.s4w", stage="host")
    with pytest.raises(ValueError, match="stage"):
        s4weights.save({}, tmp_path / "x.s4w", blocking=False, stage="none")  # type: ignore[call-overload]
    assert not (tmp_path / "x.s4w").exists()


@pytest.mark.parametrize("memory", [0, 1000, 1 << 40])
@pytest.mark.parametrize("stage", ["auto", "host"])
def test_what_does_not_fit_the_budget_is_read_before_the_call_returns(
    stage: Any, memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    copy_storages = _pending.HostBuffer.copy

    def copies(buffer: Any, storages: Any) -> Any:
        copied.append(sum(storage.nbytes() for storage in storages))
        return copy_storages(buffer, storages)

    monkeypatch.setattr(_pending.HostBuffer, "copy", copies)
    values = state()
    with CheckpointStore(tmp_path, staging_memory=memory) as store:
        expected = []
        for step in range(4):
            expected.append(copy.deepcopy(values))
            pending = store.save_checkpoint(values, step, blocking=False, stage=stage)
            assert pending.staged.done() and pending.stage == "host"
            spoil(values)
        pending.wait(60)
        for step, old in enumerate(expected):
            assert_identical(old, store.load_checkpoint(step))
    assert [n > 0 for n in copied] == [memory > 1000] * 4


@pytest.mark.parametrize("stage", STAGES)
def test_files(stage: Any, path: Path) -> None:
    values, gate = state(), Gate()
    expected = copy.deepcopy(values)
    pending = s4weights.save(values, path, blocking=False, stage=stage, progress=gate)
    assert pending.target == str(path)
    if stage == "lazy":
        assert gate.reached.wait(60) and not pending.staged.done()
    else:
        assert pending.staged.done()
        spoil(values)
        assert gate.reached.wait(60)
    assert not path.exists() and not pending.done()
    gate.open.set()
    report = pending.wait(60)
    assert pending.staged.done() and report["bytes_out"] == path.stat().st_size
    assert_identical(expected, s4weights.load(path))
    blocking = s4weights.save(expected, path)
    assert {**blocking, "seconds": 0} == {**report, "seconds": 0}


@pytest.mark.parametrize("stage", STAGES)
def test_files_of_pickled_objects_and_streams(stage: Any) -> None:
    values = {"w": torch.randn(5000), "what": SimpleNamespace(a=torch.arange(10))}
    stream = io.BytesIO()
    pending = s4weights.save(values, stream, blocking=False, stage=stage, staging_memory=0)
    pending.wait(60)
    stream.seek(0)
    loaded = s4weights.load(stream, weights_only=False)
    assert torch.equal(loaded["w"], values["w"]) and loaded["what"].a[9] == 9


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        s4weights.save(state(), tmp_path / "no" / "x.s4w", blocking=False)

    class Full(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

    _, optimizer, backward = training()
    pending = s4weights.save(state(), Full(), blocking=False, stage="lazy")
    pending.guard(optimizer)
    backward()
    optimizer.step()
    with pytest.raises(OSError, match="No space"):
        pending.wait(60)


def test_a_cancelled_file_leaves_nothing(path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done:
            raise RuntimeError("enough")

    pending = s4weights.save(state(), path, blocking=False, progress=stop)
    with pytest.raises(RuntimeError, match="enough"):
        pending.wait(60)
    assert list(path.parent.iterdir()) == []


def test_one_checkpoint_in_the_background(tmp_path: Path) -> None:
    values = state()
    expected = copy.deepcopy(values)
    pending = s4weights.save_checkpoint(values, tmp_path, 3, blocking=False, stage="host")
    spoil(values)
    assert pending.wait(60).step == 3
    assert_identical(expected, s4weights.load_checkpoint(tmp_path))
    failed = s4weights.save_checkpoint({}, tmp_path, 4, TOO_LONG, blocking=False)
    with pytest.raises(LimitError, match="log entry"):
        failed.wait(60)
    with pytest.raises(ValueError, match="blocking=False"):
        s4weights.save_checkpoint({}, tmp_path, 5, stage="host")


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_process_that_ends_finishes_its_file(path: Path) -> None:
    script = """
import sys, torch, s4weights
s4weights.save({"w": torch.randn(1 << 20)}, sys.argv[1], blocking=False, stage=sys.argv[2])
"""
    for stage in STAGES:
        done = run(script, path, stage)
        assert (done.returncode, done.stderr) == (0, "")
        assert s4weights.load(path)["w"].numel() == 1 << 20
        path.unlink()


def test_a_file_that_failed_unseen_is_told_of_at_the_end() -> None:
    script = """
import io, torch, s4weights
class Full(io.RawIOBase):
    def writable(self): return True
    def write(self, data): raise OSError(28, "No space left on device")
s4weights.save({"w": torch.randn(1 << 20)}, Full(), blocking=False)
"""
    done = run(script)
    assert done.returncode == 120 and "FAILED" in done.stderr, done


def test_in_a_forked_process_nobody_waits(tmp_path: Path) -> None:
    script = """
import os, sys, threading, torch, s4weights
gate = threading.Event()
def progress(done, total):
    if done:
        gate.wait()
parameter = torch.nn.Parameter(torch.randn(5000))
optimizer = torch.optim.SGD([parameter], lr=1.0)
with s4weights.CheckpointStore(sys.argv[1]) as store:
    pending = store.save_checkpoint({"w": parameter.data}, 1, blocking=False, stage="lazy",
                                    progress=progress)
    pending.guard(optimizer)
    parameter.grad = torch.ones(5000)
    pid = os.fork()
    if pid == 0:
        optimizer.step()
        pending.wait_staged()
        try:
            pending.wait()
        except s4weights.S4Error:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    before = parameter.detach().clone()
    gate.set()
    optimizer.step()
    assert torch.equal(store.load_checkpoint()["w"], before)
"""
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr


class FakeCopies:
    """Copies on a device that does not exist."""

    def __init__(self, tensors: Any) -> None:
        self.list = [(1 << 40, (where[0], 99)) for _, _, where in tensors]
        self.done: list[Any] = []

    def places(self) -> Any:
        return self.list

    def wait(self) -> None:
        self.done.append("wait")

    def hold(self, ordinal: int, stream: int) -> None:
        self.done.append(("hold", ordinal, stream))

    def free(self) -> None:
        self.done.append("free")


class FakeEngine:
    """An engine for a device of 80 GiB that does not exist."""

    def __init__(self, free: int, pinned: int = 0) -> None:
        self.free = free
        self.pinned = pinned
        self.leave: dict[int, int] = {}
        self.room: dict[int, int] = {}

    def memory(self, ordinal: int) -> tuple[int, int]:
        return self.free, 80 << 30

    def copy(self, sources: Any, leave: dict[int, int]) -> FakeCopies:
        self.leave = leave
        tensors = sources.on_devices()
        needed = sum(nbytes for _, nbytes, _ in tensors)
        if needed + leave[0] > self.free:
            raise LimitError(f"a copy needs {needed} bytes")
        return FakeCopies(tensors)

    def after(self, ordinal: int, stream: int) -> int:
        return stream + 1000

    def copy_to_host(self, sources: Any, room: dict[int, int]) -> FakeHostCopies:
        self.room = room
        tensors = sources.on_devices()
        needed = sum(nbytes for _, nbytes, _ in tensors)
        if needed > self.pinned:
            raise LimitError(f"copies need {needed} bytes")
        return FakeHostCopies(tensors)


class FakeHostCopies:
    """Copies in page-locked memory that does not exist."""

    def __init__(self, tensors: Any) -> None:
        self.tensors = tensors
        self.has_arrived = self.is_free = False

    def wait(self) -> None:
        self.has_arrived = True

    def addresses(self) -> list[int]:
        return [(1 << 50) + i for i in range(len(self.tensors))]

    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes, _ in self.tensors)

    def free(self) -> None:
        self.is_free = True


class FakeStorage:
    """A storage on a device that does not exist."""

    device = torch.device("cuda", 0)

    def __init__(self, nbytes: int) -> None:
        self._nbytes, self._cdata = nbytes, id(self)

    def nbytes(self) -> int:
        return self._nbytes

    def data_ptr(self) -> int:
        return 1 << 30


@pytest.fixture
def storages(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tensor on a device, one in host memory, and an empty one."""
    monkeypatch.setattr(_staging, "current_streams", lambda ordinals: dict.fromkeys(ordinals, 5))
    monkeypatch.setattr(_staging, "_regrowth", lambda ordinal: 1 << 30)
    host = torch.arange(10.0).untyped_storage()
    found = _storages.StorageWriter()
    all_storages: list[Any] = [FakeStorage(4 << 30), host, FakeStorage(0)]
    for storage in all_storages:
        found.number(storage, lambda: _storages.Hint("t", torch.uint8, None))
    return found


def stage_fake(storages: Any, free: int, stage: str, pinned: int = 0, **budget: Any) -> Any:
    engine: Any = FakeEngine(free, pinned)
    buffer = _pending.HostBuffer(None)
    values = _staging.stage_values(storages, engine, stage, buffer, _staging.Budget(**budget))
    return values, engine


def test_there_is_room_if_enough_stays_free(storages: Any) -> None:
    # The copy takes 4 GiB; a tenth of the device, and 1 GiB that PyTorch once had, stay free.
    room = (4 + 8 + 1) << 30
    for stage in ("auto", "device"):
        values, engine = stage_fake(storages, room, stage)
        assert (values.stage, values.waits, values.is_ready) == ("device", False, True)
        assert engine.leave == {0: 9 << 30}
        assert values.sources[0][3:] == (1 << 40, 4 << 30, (0, 99))
        assert values.sources[1][5] == values.sources[2][5] == (-1, 0)
        assert values.sources[1][3] != storages.all()[1].data_ptr()
        assert values.sources[2][3:5] == (0, 0)
        values.settle()
        assert values._held is None
        values.release()
        assert values._copies.done == ["wait", "free"]
    values, _ = stage_fake(storages, room - 1, "auto")
    assert (values.stage, values.waits, values.is_ready) == ("host", True, False)
    assert values.sources[0][3:] == (1 << 30, 4 << 30, (0, 5))
    assert len(values._held.native) == 3
    with pytest.raises(LimitError, match=rf'stage="device".*{4 << 30} bytes'):
        stage_fake(storages, room - 1, "device")
    values, engine = stage_fake(storages, 5 << 30, "auto", device_reserve=0)
    assert values.stage == "device" and engine.leave == {0: 1 << 30}
    values, engine = stage_fake(storages, room, "auto", scratch=1)
    assert values.stage == "host" and engine.leave == {0: (9 << 30) + 1}


def test_lazy_reads_behind_what_was_queued_at_the_call(storages: Any) -> None:
    values, _ = stage_fake(storages, 0, "lazy")
    assert (values.stage, values.waits, values.is_ready) == ("lazy", False, False)
    assert values.reads_host and len(values._held.native) == 3
    assert values.sources[0][3:] == (1 << 30, 4 << 30, (0, 1005))
    assert values.sources[1][3] == storages.all()[1].data_ptr()
    values.settle()
    assert len(values._held.native) == 3
    values.release()
    assert values._held is None


def test_host_waits_for_the_device(storages: Any) -> None:
    values, _ = stage_fake(storages, 80 << 30, "host")
    assert (values.stage, values.waits, values.reads_host) == ("host", True, False)
    assert values.sources[0][5] == (0, 5)
    values, _ = stage_fake(storages, 80 << 30, "host", host=39)
    assert values.waits and values.reads_host
    values, _ = stage_fake(storages, 80 << 30, "host", host=50)
    assert not values.reads_host and values.upload_memory == 10


def test_host_copies_if_page_locked_memory_has_room(storages: Any) -> None:
    for stage in ("auto", "host"):
        values, _ = stage_fake(storages, 0, stage, pinned=4 << 30)
        assert (values.stage, values.waits, values.is_ready) == ("host", False, True)
        assert values.engine is None and not values.reads_host
        assert values.sources[0][3:] == (1 << 50, 4 << 30, (-1, 0))
        assert values.sources[1][3] != storages.all()[1].data_ptr()
        # The copies are read until the save ends; the caller's tensors are not read any more.
        assert not values._host_copies.has_arrived
        values.settle()
        assert values._held is None and values._host_copies.has_arrived
        values.release()
        assert not values._host_copies.is_free
        values.end()
        assert values._host_copies.is_free
    values, _ = stage_fake(storages, 0, "host", pinned=(4 << 30) - 1)
    assert values.waits and values._host_copies is None
    # The limit of host memory for staging includes these copies.
    values, _ = stage_fake(storages, 0, "host", pinned=4 << 30, host=(4 << 30) - 1)
    assert values.waits and values._host_copies is None
    values, _ = stage_fake(storages, 0, "host", pinned=4 << 30, host=(4 << 30) + 50)
    assert not values.waits and not values.reads_host and values.upload_memory == 10


def test_host_copies_go_by_way_of_the_room_on_the_device(storages: Any) -> None:
    # A tenth of the device, 1 GiB that PyTorch once had, and memory for encoding stay free.
    least = (9 << 30) + 256 * (1 << 20)
    room: dict[str, Any] = {"pinned": 4 << 30, "scratch": 256 << 20}
    _, engine = stage_fake(storages, least + (3 << 30), "auto", **room)
    assert engine.room == {0: 3 << 30}
    _, engine = stage_fake(storages, least + (3 << 30), "host", **room)
    assert engine.room == {0: 256 << 20}
    _, engine = stage_fake(storages, least + 5, "host", **room)
    assert engine.room == {0: 5}
    _, engine = stage_fake(storages, least - 1, "host", **room)
    assert engine.room == {0: 0}


def test_a_guard_lets_streams_wait_for_copies(
    storages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, _ = stage_fake(storages, 80 << 30, "device")
    stream = SimpleNamespace(cuda_stream=17)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda ordinal: stream)
    pending = s4weights.PendingSave(0, "somewhere")
    pending._take(values)
    _, optimizer, backward = training()
    pending.guard(optimizer)
    backward()
    optimizer.step()
    optimizer.step()
    assert values._copies.done == [("hold", 0, 17)]
    pending.wait_staged()
    assert values._copies.done == [("hold", 0, 17), "wait"]


def test_without_an_engine_devices_are_not_copied(storages: Any) -> None:
    buffer = _pending.HostBuffer(None)
    with pytest.raises(S4Error, match='stage="device"'):
        _staging.stage_values(storages, None, "device", buffer, _staging.Budget())
