"""Ctrl-C ends any call within a second, whatever the server does, and leaves nothing half done."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_logging import saved_after_damage

import s4weights
import s4weights.numpy
from in_time import in_time
from s4weights import CheckpointStore
from silent_s3 import SilentS3

pytestmark = pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals")

STATE = {"w": torch.arange(300_000, dtype=torch.float32)}


@pytest.fixture
def server() -> Iterator[SilentS3]:
    with SilentS3() as server:
        yield server


@pytest.fixture(autouse=True)
def sigint_raises() -> Iterator[None]:
    """Makes Ctrl-C raise, even if the tests inherit a SIGINT that is ignored, as shells' background
    jobs do."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(server: SilentS3, work: Callable[[], object]) -> float:
    """Presses Ctrl-C once the server is silent; returns how long the call then took to end."""
    server.fell_silent.clear()
    pressed: list[float] = []

    def press() -> None:
        if server.fell_silent.wait(120):
            time.sleep(0.1)
            pressed.append(time.monotonic())
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
        ended = time.monotonic()
    finally:
        thread.join()
    assert pressed, "the call never met the silent server"
    return ended - pressed[0]


def open_store(server: SilentS3, **options: Any) -> CheckpointStore:
    return CheckpointStore("s3://bucket/run", storage_options=server.options, **options)


def test_a_server_that_never_answers(server: SilentS3) -> None:
    server.silent = lambda method, key: True
    for work in (
        lambda: open_store(server).list(),
        lambda: open_store(server).latest(),
        lambda: open_store(server).load_checkpoint(),
        lambda: open_store(server).save_checkpoint(STATE, 1),
        lambda: open_store(server).gc(),
        lambda: s4weights.save(STATE, "s3://bucket/a.s4w", storage_options=storage(server)),
        lambda: s4weights.load("s3://bucket/a.s4w", storage_options=storage(server)),
        lambda: s4weights.verify("s3://bucket/a.s4w", storage_options=storage(server)),
    ):
        in_time(1, lambda work=work: interrupted(server, work))
    assert not server.objects


def storage(server: SilentS3) -> dict[str, str]:
    options = server.options
    return {
        "aws_access_key_id": options["key"],
        "aws_secret_access_key": options["secret"],
        "aws_region": options["region"],
        "aws_endpoint": options["endpoint_url"],
        "aws_allow_http": "true",
    }


def test_a_server_that_falls_silent_in_mid_save(server: SilentS3) -> None:
    """At the first upload, at the commit, and while the log is read."""
    with open_store(server) as store:
        store.save_checkpoint(STATE, 1)
        later = {"w": STATE["w"] * 2}
        for where in ("/d-", "manifest", "/log/"):
            server.silent = lambda method, key, where=where: method == "PUT" and where in key
            in_time(1, lambda: interrupted(server, lambda: store.save_checkpoint(later, 2)))
        server.silent = lambda method, key: method == "GET" and "log" in key
        with open_store(server) as other:
            in_time(1, lambda: interrupted(server, lambda: other.list()))
        server.silent = lambda method, key: False
    with open_store(server) as store:
        # A save that was stopped during its commit is listed whole or not at all.
        assert [e.step for e in store.list()] in ([1], [1, 2])
        assert torch.equal(store.load_checkpoint(1)["w"], STATE["w"])
        assert store.verify()["clean"]
        store.save_checkpoint(later, 3)
        assert torch.equal(store.load_checkpoint()["w"], later["w"])


def test_a_server_that_falls_silent_in_mid_load(server: SilentS3) -> None:
    with open_store(server) as store:
        store.save_checkpoint(STATE, 1)
    s4weights.save(STATE, "s3://bucket/a.s4w", storage_options=storage(server))
    server.silent = lambda method, key: method == "GET" and ("/d-" in key or key == "a.s4w")
    for work in (
        lambda: open_store(server).load_checkpoint(),
        lambda: open_store(server).verify(),
        lambda: s4weights.load("s3://bucket/a.s4w", storage_options=storage(server)),
    ):
        in_time(1, lambda work=work: interrupted(server, work))


def test_the_time_for_a_request_can_be_set(server: SilentS3) -> None:
    server.silent = lambda method, key: True

    def give_up() -> None:
        with pytest.raises(s4weights.StorageError) as raised:
            open_store(server, timeout=1.0).list()
        assert isinstance(raised.value, OSError)

    in_time(5, give_up)
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout"):
            open_store(server, timeout=bad)


def test_ctrl_c_while_another_thread_saves(tmp_path: Path) -> None:
    """A thread that waits for another thread's save can be interrupted; that save goes on."""
    started, goes_on = threading.Event(), threading.Event()

    def progress(done: int, total: int) -> None:
        if done:
            started.set()
            assert goes_on.wait(300)

    with CheckpointStore(tmp_path) as store:
        state = {"w": torch.randn(1 << 20)}
        thread = threading.Thread(target=lambda: store.save_checkpoint(state, 1, progress=progress))
        thread.start()
        assert started.wait(60)
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)

        def interrupt() -> None:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                store.save_checkpoint(state, 2)
            assert thread.is_alive(), "the call waited for the other save"

        try:
            in_time(1, interrupt)
        finally:
            goes_on.set()
            thread.join()
            signal.signal(signal.SIGALRM, before)
        assert [entry.step for entry in store.list()] == [1]


class Terminated(Exception):
    """The exception of a program's handler of SIGTERM."""


def delivered(path: Path, emit: Callable[[logging.LogRecord], None]) -> None:
    """Saves with a logging handler that is given what the native side logs: a warning at least."""

    class Emitting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            emit(record)

    handler = Emitting()
    logger = logging.getLogger("s4weights.store")
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        saved_after_damage(path).close()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit, Terminated])
def test_a_signal_while_records_are_logged(tmp_path: Path, raised: type[BaseException]) -> None:
    def terminate(number: int, frame: object) -> None:
        # As programs do that let a second signal kill them.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise raised

    def emit(record: logging.LogRecord) -> None:
        if signal.getsignal(signal.SIGTERM) is terminate:
            # Its handler runs before this returns.
            signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        with pytest.raises(raised):
            delivered(tmp_path, emit)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_error_of_a_logging_handler_is_printed(tmp_path: Path) -> None:
    printed: list[Any] = []
    hook, sys.unraisablehook = sys.unraisablehook, lambda e: printed.append(e.exc_value)

    def emit(record: logging.LogRecord) -> None:
        raise ValueError("broken handler")

    try:
        delivered(tmp_path, emit)
    finally:
        sys.unraisablehook = hook
    assert printed and all(isinstance(e, ValueError) for e in printed)


STAGES = ("auto", "device", "host", "lazy", "in place")


@pytest.fixture(params=["the thread runs", "the thread has ended", "no thread"])
def start_raises(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes while a save waits for its thread, or just before that begins."""
    start = threading.Thread.start

    def interrupted_start(thread: threading.Thread) -> None:
        if not thread.name.startswith("s4weights-save"):
            return start(thread)
        if request.param != "no thread":
            start(thread)
        if request.param == "the thread has ended":
            thread.join()
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted_start)


def background(stage: str) -> dict[str, Any]:
    """``in place``: the call waits until the tensors have been read."""
    if stage == "in place":
        return {"blocking": False, "stage": "host", "staging_memory": 0}
    return {"blocking": False, "stage": stage}


def values(number: float) -> dict[str, torch.Tensor]:
    return {str(n): torch.full((400,), number) for n in range(300)}


def numbers(state: dict[str, torch.Tensor]) -> set[float]:
    return {float(tensor.unique()) for tensor in state.values()}


@pytest.mark.parametrize("stage", STAGES)
def test_a_file_whose_background_save_is_interrupted(
    tmp_path: Path, stage: str, start_raises: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    s4weights.save(values(0), path)
    changed = values(1)
    with pytest.raises(KeyboardInterrupt):
        s4weights.save(changed, path, **background(stage))
    # The program goes on: changes its tensors, and uses the memory of the copies.
    for tensor in changed.values():
        tensor.fill_(-1)
    others = [values(2) for _ in range(3)]
    save_threads_end()
    assert numbers(s4weights.load(path)) < {0.0, 1.0} and len(others) == 3
    # Later saves neither wait for it, nor are replaced by it.
    monkeypatch.undo()
    s4weights.save(values(3), path)
    s4weights.save(values(4), path, blocking=False).wait(120)
    assert numbers(s4weights.load(path)) == {4.0}


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_whose_background_save_is_interrupted(
    tmp_path: Path, stage: str, start_raises: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = background(stage)
    with CheckpointStore(tmp_path, staging_memory=how.pop("staging_memory", None)) as store:
        store.save_checkpoint(values(0), 0)
        changed = values(1)
        with pytest.raises(KeyboardInterrupt):
            store.save_checkpoint(changed, 1, **how)
        for tensor in changed.values():
            tensor.fill_(-1)
        others = [values(2) for _ in range(3)]
        listed = [entry.step for entry in store.list()]
        save_threads_end()
        # It had ended when the call raised.
        assert [entry.step for entry in store.list()] == listed and len(others) == 3
        assert all(numbers(store.load_checkpoint(step)) == {float(step)} for step in listed)
        monkeypatch.undo()
        store.save_checkpoint(values(3), 3, blocking=False).wait(120)
        assert numbers(store.load_checkpoint()) == {3.0}


def save_threads_end() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("s4weights-save"):
            thread.join(120)
            assert not thread.is_alive()


class Raising:
    """Raises in the Python code of given files, as a signal handler would: where a function begins,
    and after it called one that is written in C.
    """

    def __init__(self, *files: str) -> None:
        self._files = files
        self._at = self._n = 0

    def rounds(self, work: Callable[[], object]) -> Iterator[int]:
        """Runs ``work`` with an exception at the first place, then at the second, and so on."""
        for at in range(1, 10_000):
            self._at, self._n = at, 0
            sys.setprofile(self._profile)
            try:
                work()
            except KeyboardInterrupt:
                pass
            finally:
                sys.setprofile(None)
            if self._n < at:
                return
            yield at

    def _profile(self, frame: Any, event: str, argument: object) -> None:
        if event in ("call", "c_return") and Path(frame.f_code.co_filename).name in self._files:
            self._n += 1
            if self._n == self._at:
                raise KeyboardInterrupt


def in_another_thread(work: Callable[[], object]) -> bool:
    """Whether the work ends."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(120)
    return not thread.is_alive()


def test_an_interrupted_save_leaves_the_store_unlocked(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        # What `save_checkpoint` calls while it holds the lock.
        store._save = lambda *arguments: None  # type: ignore[assignment, method-assign]
        rounds = Raising("_turn.py", "_store.py").rounds(lambda: store.save_checkpoint({}, 1))
        for _ in rounds:
            assert in_another_thread(lambda: store.save_checkpoint({}, 1))
            assert not store._saving_here


def test_an_interrupted_save_of_a_file_holds_up_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for _ in Raising("_save.py").rounds(lambda: s4weights.save({"a": 1}, path)):
        assert in_another_thread(lambda: s4weights.save({"a": 2}, path))
        assert s4weights.load(path) == {"a": 2}
        s4weights.save({"a": 3}, path)
    for _ in Raising("numpy.py").rounds(lambda: s4weights.numpy.save({"a": 1}, path)):
        assert in_another_thread(lambda: s4weights.numpy.save({"a": 2}, path))


def test_a_background_save_that_is_given_up_ends_soon(server: SilentS3) -> None:
    """Even while the server does not answer."""
    with open_store(server) as store:
        store.save_checkpoint({}, 1)
        server.silent = lambda method, key: method == "PUT" and "/d-" in key

        def give_up() -> float:
            server.fell_silent.clear()
            pending = store.save_checkpoint(STATE, 2, blocking=False)
            assert server.fell_silent.wait(60)
            start = time.monotonic()
            pending._give_up()
            assert pending.done()
            return time.monotonic() - start

        in_time(2, give_up)
        server.silent = lambda method, key: False
        assert [entry.step for entry in store.list()] == [1]


@pytest.mark.parametrize("stage", ["auto", "host", "lazy"])
@pytest.mark.parametrize("which", [1, 2])
def test_a_submission_to_a_runner_that_is_interrupted(
    tmp_path: Path, stage: str, which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the thread of the file starts, and while that of the submission does."""
    from s4weights._runner import RunnerClient

    asked: list[str] = []

    def request(client: object, method: str, path: str, message: object = None) -> dict[str, str]:
        asked.append(f"{method} {path}")
        return {"incoming": str(tmp_path)}

    start, started = threading.Thread.start, 0

    def interrupted_start(thread: threading.Thread) -> None:
        nonlocal started
        start(thread)
        started += 1
        if started == which:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunnerClient, "_request", request)
    how = background(stage)
    with CheckpointStore(tmp_path / "store", runner="unix:///socket") as store:
        changed = values(1)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", interrupted_start)
            with pytest.raises(KeyboardInterrupt):
                store.save_checkpoint(changed, 1, **how)
        for tensor in changed.values():
            tensor.fill_(-1)
        count = len(asked)
        save_threads_end()
        assert len(asked) == count
        for file in tmp_path.glob("*.s4w"):
            assert numbers(s4weights.load(file)) == {1.0}
        given: Any = store.save_checkpoint(values(2), 2, **how)
        given._submission.wait(120)
        assert asked[-1] == "POST /v1/submissions"
