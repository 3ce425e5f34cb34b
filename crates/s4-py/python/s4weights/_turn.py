"""Whose turn it is to save."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Turn:
    """A lock that raises an error if one thread takes it twice: a progress function or a signal
    handler would change the data of the interrupted save on that thread.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def is_mine(self) -> bool:
        """Whether this thread holds the lock."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    def take(self) -> contextlib.AbstractContextManager[bool]:
        """The lock, for a ``with`` statement.

        Not a context manager of ours: a signal handler may raise wherever Python code runs, also
        after `__enter__` has taken the lock and before the ``with`` statement knows. Between the
        end of a C function and the ``with`` statement, no signal handler runs.
        """
        if self.is_mine():
            raise RuntimeError(
                "this thread is already saving to the same store: a progress function or a signal handler "
                "can neither save to it nor close it"
            )
        return self._lock

    @contextlib.contextmanager
    def wait(self, seconds: float) -> Iterator[bool]:
        """Hold the lock if it can be acquired within ``seconds``, or if this thread holds it
        already. Yields whether it is held.
        """
        held = self._lock.acquire(timeout=seconds)
        try:
            yield held
        finally:
            if held:
                self._lock.release()
