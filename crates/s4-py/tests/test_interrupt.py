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
    pressed: list[float] = []

    def press() -> None:
        if server.fell_silent.wait(30):
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
        server.fell_silent.clear()
        assert interrupted(server, work) < 1
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
            server.fell_silent.clear()
            server.silent = lambda method, key, where=where: method == "PUT" and where in key
            assert interrupted(server, lambda: store.save_checkpoint(later, 2)) < 1, where
        server.silent = lambda method, key: method == "GET" and "log" in key
        server.fell_silent.clear()
        with open_store(server) as other:
            assert interrupted(server, lambda: other.list()) < 1
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
        server.fell_silent.clear()
        assert interrupted(server, work) < 1


def test_the_time_for_a_request_can_be_set(server: SilentS3) -> None:
    server.silent = lambda method, key: True
    start = time.monotonic()
    with pytest.raises(s4weights.StorageError) as raised:
        open_store(server, timeout=1.0).list()
    assert time.monotonic() - start < 5
    assert isinstance(raised.value, OSError)
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout"):
            open_store(server, timeout=bad)


def test_ctrl_c_while_another_thread_saves(tmp_path: Path) -> None:
    """A thread that waits for another thread's save can be interrupted; that save goes on."""
    started = threading.Event()
    with CheckpointStore(tmp_path, bandwidth=8 << 20) as store:
        state = {"w": torch.randn(4 << 20)}

        def save() -> None:
            store.save_checkpoint(state, 1, progress=lambda done, total: started.set())

        thread = threading.Thread(target=save)
        thread.start()
        assert started.wait(30)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            store.save_checkpoint(state, 2)
        assert time.monotonic() - start < 1
        thread.join()
        assert [entry.step for entry in store.list()] == [1]


class Terminated(Exception):
    """What a program's handler of SIGTERM raises."""


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
