"""Background saves, cancelled saves, and processes that end or fork during saves."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from compare import TOO_LONG
from in_time import in_time
from s4weights import CheckpointStore


def big_state(mib: int = 64) -> dict[str, Any]:
    return {"w": torch.randn(mib << 18), "step": torch.zeros(())}


def test_the_snapshot_is_the_state_at_the_call(tmp_path: Path) -> None:
    state = big_state(16)
    with CheckpointStore(tmp_path) as store:
        expected = []
        for step in range(3):
            state["w"][:1000] += 1
            expected.append(state["w"].clone())
            pending = store.save_checkpoint(state, step, blocking=False)
            assert pending.staged.done() and pending.step == step
            state["w"].zero_()  # The caller goes on at once.
            state["w"] = expected[-1].clone()
        entry = pending.committed.result(60)
        assert (entry.step, entry.kind) == (2, "delta") and pending.done()
        for step, values in enumerate(expected):
            assert torch.equal(store.load_checkpoint(step)["w"], values)


def test_views_and_ties_survive_a_snapshot(tmp_path: Path) -> None:
    w = torch.rand(100, 100)
    with CheckpointStore(tmp_path) as store:
        store.save_checkpoint({"a": w, "b": w.t(), "c": w[3:5]}, 0, blocking=False).wait()
        loaded = store.load_checkpoint()
    assert torch.equal(loaded["b"], w.t()) and torch.equal(loaded["c"], w[3:5])
    loaded["a"].zero_()
    assert not loaded["b"].any()


def test_an_error_is_raised_at_the_next_call(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store = CheckpointStore(folder)
    store.save_checkpoint({}, 0)
    bad = TOO_LONG
    store.save_checkpoint({}, 1, bad, blocking=False)
    with pytest.raises(s4weights.LimitError, match="log entry"):
        store.save_checkpoint({}, 2)
    # The error was raised once, so the next call works.
    store.save_checkpoint({}, 3)
    store.save_checkpoint({}, 4, bad, blocking=False)
    with pytest.raises(s4weights.LimitError, match="log entry"):
        store.close()
    assert CheckpointStore(folder).latest() == 3


def test_an_error_that_was_seen_is_not_raised_again(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        pending = store.save_checkpoint({}, 1, TOO_LONG, blocking=False)
        with pytest.raises(s4weights.LimitError, match="log entry"):
            pending.wait()
        store.save_checkpoint({}, 2)
        assert store.latest() == 2


def test_the_error_of_a_with_block_comes_first(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), CheckpointStore(tmp_path) as store:
        store.save_checkpoint({}, 1, TOO_LONG, blocking=False)
        raise ZeroDivisionError


def test_what_progress_raises_cancels(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done:
            raise RuntimeError("enough")

    with CheckpointStore(tmp_path) as store:
        store.save_checkpoint({}, 0)
        with pytest.raises(RuntimeError, match="enough"):
            store.save_checkpoint(big_state(), 1, progress=stop)
        pending = store.save_checkpoint(big_state(), 2, progress=stop, blocking=False)
        with pytest.raises(RuntimeError, match="enough"):
            pending.wait(60)
        assert store.latest() == 0
        store.save_checkpoint(big_state(1), 3)
        with pytest.raises(RuntimeError, match="enough"):
            store.load_checkpoint(progress=stop)


def test_other_threads_go_on(tmp_path: Path) -> None:
    ticks, done = [], threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.005)

    thread = threading.Thread(target=tick)
    with CheckpointStore(tmp_path) as store:
        thread.start()
        start = time.perf_counter()
        store.save_checkpoint(big_state(128), 0)
        seconds = time.perf_counter() - start
        done.set()
        thread.join()
    assert len(ticks) > min(10, seconds / 0.1)


def test_a_forked_process_may_use_the_store(tmp_path: Path) -> None:
    script = """
import os, sys, torch
from s4weights import CheckpointStore
store = CheckpointStore(sys.argv[1])
store.save_checkpoint({"w": torch.arange(5000)}, 1)
pid = os.fork()
if pid == 0:
    assert store.latest() == 1
    assert store.load_checkpoint()["w"][7] == 7
    store.save_checkpoint({"w": torch.arange(6000)}, 2)
    store.close()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert store.latest() == 2
store.save_checkpoint({}, 3)
store.close()
"""
    command = [sys.executable, "-c", script, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_process_that_ends_finishes_its_save(tmp_path: Path) -> None:
    script = """
import sys, torch
from s4weights import CheckpointStore
store = CheckpointStore(sys.argv[1])
store.save_checkpoint({"w": torch.randn(1 << 22)}, 1, blocking=False)
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    assert subprocess.run(command, timeout=120).returncode == 0
    assert CheckpointStore(tmp_path).latest() == 1


TERMINATED = """
import sys, time, torch
import s4weights
# Slow enough that the signal comes in time, on any machine.
store = s4weights.CheckpointStore(sys.argv[1], bandwidth=int(sys.argv[4]) << 20)
blocking, deadline = sys.argv[2] == "blocking", float(sys.argv[3])
state = {"w": torch.randn(24 << 20)}
store.save_checkpoint({}, 0)
def progress(done, total):
    if done:
        print("saving", flush=True)
with s4weights.finish_on_sigterm(store, deadline):
    store.save_checkpoint(state, 1, blocking=blocking, progress=progress)
    time.sleep(600)
"""


@pytest.mark.parametrize("kind", ["blocking", "background"])
@pytest.mark.parametrize(("deadline", "mib"), [(200.0, 30), (0.0, 2)])
def test_sigterm_lets_a_save_finish_or_gives_it_up(
    tmp_path: Path, kind: str, deadline: float, mib: int
) -> None:
    command = [sys.executable, "-c", TERMINATED, str(tmp_path / "s"), kind, str(deadline), str(mib)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"saving\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=300)  # It would sleep for longer.
    assert process.returncode == -signal.SIGTERM
    with CheckpointStore(tmp_path / "s") as store:
        assert store.latest() == (1 if deadline else 0)
        assert store.verify()["clean"]


def test_killed_in_the_middle_costs_no_listed_step(tmp_path: Path) -> None:
    script = TERMINATED.replace("state, 1", "state, 9")
    with CheckpointStore(tmp_path / "s") as store:
        store.save_checkpoint({"w": torch.arange(9000)}, 5)
    command = [sys.executable, "-c", script, str(tmp_path / "s"), "blocking", "0", "8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"saving\n"
        # Progress counts encoded bytes, which run ahead of the written ones.
        written = (tmp_path / "s" / "ck").glob
        while len(list(written("*/d-*"))) < 2:
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    with CheckpointStore(tmp_path / "s") as store:
        assert [entry.step for entry in store.list()] == [5, 0]
        assert torch.equal(store.load_checkpoint(5)["w"], torch.arange(9000))
        store.save_checkpoint({"w": torch.arange(8000)}, 10)
        assert store.verify()["clean"]
        left = store.gc(True, grace=0, exclusive=True)
        assert left["given_up"] or left["deleted"]


def test_blocking_time_is_about_a_copy(tmp_path: Path) -> None:
    """A bound that holds on a busy machine; the figure itself is measured elsewhere."""
    state = big_state(128)
    target = torch.empty_like(state["w"])
    target.copy_(state["w"])

    def seconds(work: Any) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    copy = min(seconds(lambda: target.copy_(state["w"])) for _ in range(5))
    with CheckpointStore(tmp_path, preset="fast") as store:
        store.save_checkpoint(state, 0, blocking=False).wait()

        def save() -> float:
            begin = time.perf_counter()
            pending = store.save_checkpoint(state, 1, blocking=False)
            blocked = time.perf_counter() - begin
            pending.wait()
            return blocked

        in_time(4 * copy + 0.05, save, tries=10)


def test_signals_are_handled_on_the_main_thread_only(tmp_path: Path) -> None:
    failed: list[BaseException] = []

    def elsewhere() -> None:
        try:
            with s4weights.finish_on_sigterm(CheckpointStore(tmp_path)):
                pass
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in str(failed[0])
