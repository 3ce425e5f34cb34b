"""Keeps the garbage collector from running while thousands of small objects are created."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import TypeVar

from . import _live

T = TypeVar("T")

#: The threads that have suspended garbage collection.
_suspended: set[int] = set()


def without_collection(work: Callable[[], T]) -> T:
    """Call a function with garbage collection suspended. Creating many objects triggers
    collections, and each one visits every object that PyTorch has created.
    """
    # Only the call that finds it enabled suspends it, and enables it again. If the calls of two
    # threads overlap, it may run in the later one, but never stays suspended.
    collects = gc.isenabled()
    try:
        if collects:
            _suspended.add(threading.get_ident())
            gc.disable()
        return work()
    finally:
        # Not in a context manager, nor after any other statement: a signal handler may raise before
        # the first Python function that is called here, and after the first C function.
        if collects:
            gc.enable()
            _suspended.discard(threading.get_ident())


def _in_child() -> None:
    # The other threads do not exist here.
    if _suspended - {threading.get_ident()}:
        gc.enable()
    _suspended.clear()


_live.at_fork(_in_child)
