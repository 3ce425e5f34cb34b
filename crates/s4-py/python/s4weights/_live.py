"""Background saves whose result has not been checked when the process forks or ends."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import _core

if TYPE_CHECKING:
    from ._pending import Pending

logger = logging.getLogger("s4weights")

#: Saves that are running, or that have failed without anyone seeing the error.
_live: set[Pending[Any]] = set()
#: Further functions to call in the child after a fork.
_resets: list[Callable[[], None]] = []
_child_hook_of = 0


def add(pending: Pending[Any]) -> None:
    """Register a save that begins."""
    global _child_hook_of
    _live.add(pending)
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is None or multiprocessing.parent_process() is None:
        return
    # A process of `multiprocessing` ends without running `atexit` hooks.
    if _child_hook_of != os.getpid():
        _child_hook_of = os.getpid()
        from multiprocessing.util import Finalize

        Finalize(None, _at_end_of_child, exitpriority=-100)


def discard(pending: Pending[Any]) -> None:
    """Unregister a save that succeeded, or whose error someone has seen."""
    _live.discard(pending)


def at_fork(reset: Callable[[], None]) -> None:
    """Register a function to call in the child after a fork. No other thread exists there: locks
    that other threads held stay locked, and what they were doing is never finished.
    """
    _resets.append(reset)


def _in_child() -> None:
    for pending in _live:
        pending._abandon()
    _live.clear()
    _core.reset_log()
    for reset in _resets:
        reset()


def _failures() -> list[str]:
    """Wait for all saves. Return messages about failed ones whose error has not been seen."""
    failed = []
    for pending in sorted(_live, key=lambda p: p._number):
        error = pending.committed.exception()
        if error is not None:
            failed.append(
                f"s4weights: {pending._what} FAILED, and the program "
                f"exited without checking its result (call `{pending._reporting_call}`): "
                f"{type(error).__name__}: {error}"
            )
    _live.clear()
    return failed


def _tell(failed: list[str]) -> None:
    for line in failed:
        if sys.stderr is not None:
            print(line, file=sys.stderr)


def _at_exit() -> None:
    try:
        failed = _failures()
        _tell(failed)
        # After an uncaught exception the exit status is not 0 anyway.
        if failed and not hasattr(sys, "last_value"):
            _fail_at_exit()
    finally:
        _core.close_log()


def _at_end_of_child() -> None:
    failed = _failures()
    _tell(failed)
    if failed and sys.exc_info()[0] is None:
        raise SystemExit(1)


class _Unsaved(Exception):
    """The exception that makes Python exit with status 120."""


class _FailingStream:
    """A standard stream whose last flush raises, after flushing.

    By then only `os._exit` can set the exit status, but it would skip other hooks and buffers. A
    failing last flush is the only thing that the interpreter itself turns into an exit status.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        if sys.is_finalizing():
            raise _Unsaved


def _fail_at_exit() -> None:
    usual = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, _Unsaved):
            usual(unraisable)

    sys.unraisablehook = hook
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout = _FailingStream(sys.stdout)
    elif sys.stderr is not None and not sys.stderr.closed:
        sys.stderr = _FailingStream(sys.stderr)


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
