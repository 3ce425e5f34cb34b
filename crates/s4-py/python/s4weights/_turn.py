"""Whose turn it is to save."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Turn:
    """A lock that one thread has at a time, and that it cannot take twice: a progress function or a
    signal handler would change what the save below it works with.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def is_mine(self) -> bool:
        """Whether this thread has it."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        if self.is_mine():
            raise RuntimeError(
                "this thread is saving to the same store: a progress function or a signal handler "
                "can neither save to it nor close it"
            )
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *exception: object) -> None:
        self._owner = None
        self._lock.release()

    @contextlib.contextmanager
    def wait(self, seconds: float) -> Iterator[bool]:
        """Has it, if it can be had within that time; also where this thread has it already."""
        if self.is_mine():
            yield True
            return
        if not self._lock.acquire(timeout=seconds):
            yield False
            return
        self._owner = threading.get_ident()
        try:
            yield True
        finally:
            self.__exit__()
