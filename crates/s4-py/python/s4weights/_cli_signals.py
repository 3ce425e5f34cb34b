"""Stops a command on a signal without leaving partial output behind."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

#: Shells add this to a signal's number to make an exit code.
SIGNALLED = 128

#: The signals that end the process.
ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Stopped(BaseException):
    """A signal has stopped the command."""


class Signals:
    """Context manager in which the first terminating signal raises `Stopped`; a second one ends the process.

    Attributes:
        came: the number of the received signal, or 0.
    """

    def __init__(self) -> None:
        self.came = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        # Only the main thread handles signals. Signals that are ignored, such as HUP under `nohup`, stay ignored.
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                if signal.getsignal(number) not in (None, signal.SIG_IGN):
                    self._before[number] = signal.signal(number, self._stop)
        return self

    def _stop(self, number: int, _: FrameType | None) -> None:
        self.came = number
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
        raise Stopped

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
