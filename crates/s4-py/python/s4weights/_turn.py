"""Whose turn it is to save."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Turn:
    """A lock that is an error to take twice on one thread: a progress function or a signal handler
    would change what the interrupted save on that thread works with.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def is_mine(self) -> bool:
        """Whether this thread holds the lock."""
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
        """Holds the lock if it can be acquired within ``seconds``, or if this thread holds it
        already. Yields whether it is held.
        """
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
