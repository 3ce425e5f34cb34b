"""Background saves beside a training loop: lazy ones describe objects later, threads give way."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import os
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_staging import Gate, state

import s4weights
import s4weights.numpy
from compare import assert_identical
from s4weights import CheckpointStore


def nested() -> dict[str, Any]:
    """Containers of every kind, nested as in state dicts."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    rest = {"list": [1, [torch.arange(5.0)]], "tuple": (2.5, {"deep": None}), ("k", 1): b"bytes"}
    kinds = {"size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cpu")}
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rest": rest, **kinds}


def test_lazy_keeps_containers_as_they_are_at_the_call(tmp_path: Path) -> None:
    values = nested()
    expected = copy.deepcopy(values)
    assert hasattr(values["model"], "_metadata")
    with CheckpointStore(tmp_path) as store:
        pending = store.save_checkpoint(values, 0, blocking=False, stage="lazy")
        values["optimizer"]["param_groups"][0]["lr"] = 0.5
        values["rest"]["list"].append(2)
        values["rest"]["list"][1].clear()
        values["model"]._metadata.clear()
        values["model"].clear()
        values.clear()
        assert pending.stage == "lazy" and pending.wait(60).kind == "base"
        loaded = store.load_checkpoint()
    assert_identical(expected, loaded)
    assert loaded["model"]._metadata == expected["model"]._metadata


class Own:
    """An object that no tree can hold."""

    def __init__(self) -> None:
        self.weight = torch.ones(1000)


def test_lazy_takes_what_is_shared_or_of_other_classes(tmp_path: Path) -> None:
    shared = [torch.ones(5000)]
    cyclic: list[Any] = [torch.zeros(10)]
    cyclic.append(cyclic)
    with CheckpointStore(tmp_path) as store:
        for step, values in enumerate([{"a": shared, "b": shared}, cyclic, Own(), {1, 2}, torch.ones(9)]):
            store.save_checkpoint(values, step, blocking=False, stage="lazy").wait(60)
        loaded = [store.load_checkpoint(step, weights_only=False) for step in range(5)]
    assert loaded[0]["a"] is loaded[0]["b"] and loaded[1][1] is loaded[1]
    assert torch.equal(loaded[2].weight, torch.ones(1000)) and loaded[3] == {1, 2}
    assert torch.equal(loaded[4], torch.ones(9))


def test_tensors_that_were_read_lazily_are_let_go(tmp_path: Path) -> None:
    values = state()
    alive = weakref.ref(values["w"])
    with CheckpointStore(tmp_path) as store:
        pending = store.save_checkpoint(values, 0, blocking=False, stage="lazy")
        del values
        pending.wait(60)
        gc.collect()
        assert alive() is None
        assert pending.stage == "lazy"


def test_what_a_lazy_save_cannot_describe_fails_in_the_background(tmp_path: Path) -> None:
    broken = torch.ones(1000)
    broken.untyped_storage().resize_(8)
    with CheckpointStore(tmp_path) as store:
        pending = store.save_checkpoint({"w": broken}, 0, blocking=False, stage="lazy")
        with pytest.raises(Exception, match=r"storage|out of bounds|setStorage"):
            pending.wait(60)
        assert pending.staged.done()
        assert store.save_checkpoint(state(), 1).step == 1


def priorities() -> dict[str, set[int]]:
    """The nice values of this process's threads, by their names."""
    found: dict[str, set[int]] = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # A thread that has just ended.
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            found.setdefault(name, set()).add(int(rest.split()[16]))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
@pytest.mark.parametrize("stage", ["host", "lazy"])
def test_threads_of_a_save_in_the_background_give_way(stage: Any, tmp_path: Path) -> None:
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    gate = Gate()
    with CheckpointStore(tmp_path, threads=2) as store:
        pending = store.save_checkpoint(state(), 0, blocking=False, stage=stage, progress=gate)
        assert gate.reached.wait(60)
        during = priorities()
        gate.open.set()
        pending.wait(60)
        assert_identical(state(), store.load_checkpoint())
    # Threads that the loop may have to wait for do not give way, and neither do Python's own, which
    # may hold the GIL.
    assert during.get("s4weights-call") == (None if stage == "lazy" else {min(19, own + 10)})
    assert during["s4weights-store"] == {own}
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


def test_nobody_can_cancel_a_save(tmp_path: Path) -> None:
    async def impatient(pending: Any) -> None:
        with pytest.raises((asyncio.TimeoutError, TimeoutError)):
            await asyncio.wait_for(asyncio.wrap_future(pending.committed), 0.01)

    store = CheckpointStore(tmp_path, threads=1)
    gate = Gate()
    pending = store.save_checkpoint(state(1), 1, blocking=False, stage="host", progress=gate)
    assert not pending.committed.cancel() and not pending.staged.cancel()
    asyncio.run(impatient(pending))
    gate.open.set()
    assert pending.wait(60).step == 1
    pending.wait_staged(60)
    assert store.save_checkpoint(state(2), 2).step == 2
    store.close()


def test_tuples_within_tuples_take_no_time(tmp_path: Path) -> None:
    shared: Any = (1, 2.0)
    for _ in range(30):
        shared = (shared, shared)
    given = {"w": torch.ones(3), "shared": shared}
    started = time.process_time()
    with CheckpointStore(tmp_path) as store:
        store.save_checkpoint(given, 1, blocking=False, stage="lazy").wait(120)
        found = store.load_checkpoint(weights_only=False)["shared"]
        assert found[0] is found[1]
    assert time.process_time() - started < 60, "each is met a billion times"


def test_the_working_directory_may_change(tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    store = CheckpointStore("store")
    file = s4weights.save(state(1), "x.s4w", blocking=False)
    pending = store.save_checkpoint(state(1), 1, blocking=False)
    monkeypatch.chdir(tmp_path / "b")
    file.wait(60)
    pending.wait(60)
    assert copy.copy(store).latest() == 1
    store.close()
    assert (tmp_path / "a/x.s4w").is_file() and (tmp_path / "a/store/repo.json").is_file()
    assert not list((tmp_path / "b").iterdir())


@pytest.mark.parametrize("save", [s4weights.save, s4weights.numpy.save])
def test_the_working_directory_may_change_while_a_call_runs(
    save: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    for name in ("a", "b", "deep", "deep/er"):
        (tmp_path / name).mkdir()
    (tmp_path / "a/link").symlink_to(tmp_path / "deep/er")
    for place, made in (("x.s4w", "a/x.s4w"), ("link/../y.s4w", "deep/y.s4w")):
        monkeypatch.chdir(tmp_path / "a")
        goes = lambda done, total: monkeypatch.chdir(tmp_path / "b")  # noqa: E731
        save({"w": np.ones(100_000)}, place, progress=goes)
        assert (tmp_path / made).is_file() and not list((tmp_path / "b").iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a directory in use stays")
def test_no_working_directory_is_needed_for_an_absolute_path(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    s4weights.save(state(1), tmp_path / "x.s4w")
    s4weights.save(state(1), f"file://{tmp_path}/y.s4w")
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(s4weights.S4Error):
        s4weights.save(state(1), "z.s4w")


def later(gate: Gate) -> threading.Timer:
    timer = threading.Timer(0.3, gate.open.set)
    timer.start()
    return timer


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("place", ["path", "relative", "url", "memory", "numpy"])
def test_the_last_save_to_a_path_wins(
    place: str, blocking: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b").mkdir()
    path = f"memory://order/{tmp_path.name}.s4w" if place == "memory" else str(tmp_path / "a.s4w")
    other = {"relative": "b/../a.s4w", "url": f"file://{path}"}.get(place, path)
    gate = Gate()
    first = s4weights.save(state(1), path, blocking=False, progress=gate)
    assert gate.reached.wait(60)
    timer = later(gate)
    if place == "numpy":
        s4weights.numpy.save({"w": np.ones(2)}, path)
        assert first.done() and list(s4weights.load(path)) == ["w"]
    elif blocking:
        s4weights.save(state(2), other)
        assert first.done()
    else:
        second = s4weights.save(state(2), other, blocking=False)
        third = s4weights.save(state(3), path, blocking=False)
        third.wait(60)
        assert first.done() and second.done()
    first.wait(60)
    timer.join()
    if place != "numpy":
        assert_identical(state(2 if blocking else 3), s4weights.load(path))


def test_a_save_that_fails_holds_up_no_other(tmp_path: Path) -> None:
    path, gate = tmp_path / "a.s4w", Gate()

    def fail(done: int, total: int) -> None:
        if done:
            gate(total, total)
            raise ZeroDivisionError

    first = s4weights.save(state(1), path, blocking=False, progress=fail)
    assert gate.reached.wait(60)
    # This one fails immediately, and the next one still waits for the first.
    with pytest.raises(Exception, match="pickle"):
        s4weights.save({"f": lambda: 0}, path)
    second = s4weights.save(state(2), path, blocking=False)
    elsewhere = s4weights.save(state(2), tmp_path / "b.s4w", blocking=False)
    elsewhere.wait(60)
    time.sleep(0.2)
    assert not second.done()
    gate.open.set()
    second.wait(60)
    with pytest.raises(ZeroDivisionError):
        first.wait(60)
    assert_identical(state(2), s4weights.load(path))


@pytest.mark.parametrize("blocking", [True, False])
def test_a_progress_function_may_save_to_the_same_path(blocking: bool, tmp_path: Path) -> None:
    path, began = tmp_path / "a.s4w", []

    def nested(done: int, total: int) -> None:
        if done == total and not began:
            # Another thread's save waits for the outer one, and so nothing may wait for that.
            began.append(s4weights.save(state(3), path, blocking=False))
            s4weights.save(state(2), path)
            s4weights.save(state(2), path, blocking=False).wait(60)

    done = s4weights.save(state(1), path, blocking=blocking, progress=nested)
    if not isinstance(done, dict):
        done.wait(60)
    began[0].wait(60)
    assert s4weights.verify(path)["tensors"]
