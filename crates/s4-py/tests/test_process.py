"""Threads, forks, signals, progress and logging."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from compare import assert_identical, storage_bytes
from in_time import in_time

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def in_fork(work: Callable[[], None]) -> None:
    """Runs work in a forked child, which must end within a minute."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    pytest.fail("the child hangs")


def round_trip(path: Path, obj: Any) -> None:
    s4weights.save(obj, path)
    loaded = s4weights.load(path)
    # Without torch.equal, since PyTorch's own threads hang in a forked child.
    assert all(
        storage_bytes(obj[k].untyped_storage()) == storage_bytes(loaded[k].untyped_storage())
        for k in obj
    )


@needs_fork
@pytest.mark.filterwarnings("ignore:.*use of fork")
def test_a_fork_after_saving_and_loading(tmp_path: Path) -> None:
    obj = {"w": torch.rand(1 << 20)}
    round_trip(tmp_path / "parent.s4w", obj)
    in_fork(lambda: round_trip(tmp_path / "child.s4w", obj))
    round_trip(tmp_path / "parent.s4w", obj)


@needs_fork
@pytest.mark.filterwarnings("ignore:.*use of fork")
def test_a_fork_while_another_thread_saves(tmp_path: Path) -> None:
    obj = {"w": torch.rand(1 << 22)}
    small = {"w": torch.rand(1 << 18)}
    started, stop = threading.Event(), threading.Event()

    def keep_saving() -> None:
        while not stop.is_set():
            s4weights.save(obj, tmp_path / "busy.s4w", progress=lambda done, total: started.set())

    thread = threading.Thread(target=keep_saving)
    thread.start()
    try:
        assert started.wait(60)
        for i in range(5):
            in_fork(lambda i=i: round_trip(tmp_path / f"child{i}.s4w", small))
    finally:
        stop.set()
        thread.join()
    assert torch.equal(s4weights.load(tmp_path / "busy.s4w")["w"], obj["w"])


def _spawned(path: str) -> None:
    round_trip(Path(path), {"w": torch.ones(1000)})


def test_a_spawned_process(path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_spawned, args=(str(path),))
    process.start()
    process.join(120)
    assert process.exitcode == 0 and s4weights.load(path)["w"].sum() == 1000


def test_many_threads_at_once(tmp_path: Path) -> None:
    objects = [{"w": torch.rand(200_000), "i": torch.tensor([i])} for i in range(12)]
    with ThreadPoolExecutor(6) as pool:
        paths = [tmp_path / f"{i}.s4w" for i in range(12)]
        list(pool.map(lambda i: s4weights.save(objects[i], paths[i]), range(12)))
        for obj, loaded in zip(objects, pool.map(s4weights.load, paths), strict=True):
            assert_identical(obj, loaded)


def test_other_threads_go_on(path: Path) -> None:
    obj = {"w": torch.rand(16 << 20)}
    beats: list[float] = []
    stop = threading.Event()

    def beat() -> None:
        while not stop.is_set():
            beats.append(time.monotonic())
            time.sleep(0.002)

    thread = threading.Thread(target=beat)
    thread.start()
    start, busy = time.monotonic(), time.process_time()
    s4weights.save(obj, path, threads=1)
    end, busy = time.monotonic(), time.process_time() - busy
    stop.set()
    thread.join()
    inside = [t for t in beats if start < t < end]
    # In proportion to the work, not to the time that a busy machine takes for it.
    assert len(inside) >= busy / 0.05


def interrupted(work: Callable[[], object], seconds: float) -> float:
    """Interrupts work that takes about `seconds`; returns how long it took to stop."""
    for fraction in (0.4, 0.2, 0.1, 0.05) * 3:
        start = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, fraction * seconds)
        try:
            work()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            return time.monotonic() - start - fraction * seconds
        # The first run may have been a slow one.
        seconds = min(seconds, time.monotonic() - start)
    pytest.fail("was not interrupted")


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers")
@pytest.mark.parametrize("threads", [1, 2])
def test_ctrl_c_stops_a_save_and_a_load(threads: int, tmp_path: Path) -> None:
    obj = {"w": torch.rand(48 << 20)}
    whole, path = tmp_path / "whole.s4w", tmp_path / "cut.s4w"
    start = time.monotonic()
    s4weights.save(obj, whole, threads=threads)
    saved = time.monotonic()
    s4weights.load(whole, threads=threads)
    loaded = time.monotonic()

    def interrupt(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:

        def save() -> None:
            # An attempt that ended before the interrupt has rightly left a file.
            path.unlink(missing_ok=True)
            s4weights.save(obj, path, threads=threads)

        def late() -> float:
            seconds = interrupted(save, saved - start)
            # The interrupt may have come when the file had just got its name.
            return float("inf") if path.exists() else seconds

        in_time(0.5 * (saved - start) + 0.3, late, tries=10)
        interrupted(lambda: s4weights.load(whole, threads=threads), loaded - saved)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert [p.name for p in tmp_path.iterdir()] == ["whole.s4w"]
    assert torch.equal(s4weights.load(whole)["w"], obj["w"])


def test_progress_is_told(path: Path) -> None:
    obj = {"w": torch.rand(4 << 20), "small": [torch.ones(5) for _ in range(20)], "x": range(2)}
    total = (16 << 20) + 400
    for work in (
        lambda report: s4weights.save(obj, path, progress=report),
        lambda report: s4weights.load(path, weights_only=False, progress=report),
    ):
        calls: list[tuple[int, int]] = []
        work(lambda done, of, calls=calls: calls.append((done, of)))
        assert calls[0] == (0, total) and calls[-1] == (total, total)
        assert calls == sorted(calls) and {of for _, of in calls} == {total}


def test_what_progress_raises_is_passed_on(path: Path) -> None:
    obj = {"w": torch.rand(1 << 20)}
    s4weights.save(obj, path)
    before = path.read_bytes()

    class Stop(BaseException):
        pass

    def stop(done: int, total: int) -> None:
        if done:
            raise Stop

    for work in (
        lambda: s4weights.save({"w": torch.zeros(1 << 20)}, path, progress=stop),
        lambda: s4weights.load(path, progress=stop),
    ):
        with pytest.raises(Stop):
            work()
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]
    with pytest.raises(TypeError, match="progress"):
        s4weights.save(obj, path, progress="yes")  # type: ignore[arg-type]


def test_progress_may_save_itself(tmp_path: Path) -> None:
    def nested(done: int, total: int) -> None:
        s4weights.save({"done": torch.tensor(done)}, tmp_path / "inner.s4w")

    s4weights.save({"w": torch.rand(1 << 20)}, tmp_path / "outer.s4w", progress=nested)
    assert s4weights.load(tmp_path / "inner.s4w")["done"] == 4 << 20


def test_progress_bars(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tqdm")
    s4weights.save({"w": torch.rand(1 << 20)}, path, progress=True)
    assert "100%" in capsys.readouterr().err


def test_progress_without_tqdm_is_logged(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with caplog.at_level(logging.DEBUG, "s4weights"):
        s4weights.save({"w": torch.rand(1 << 20)}, path, progress=True)
        s4weights.load(path)
    text = caplog.text
    assert "100%" in text and "saved 4194304 bytes" in text and "loaded 1 tensors" in text
