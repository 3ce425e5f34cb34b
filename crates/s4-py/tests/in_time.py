"""Bounds on time that hold on a machine that is busy, or stalls for seconds; and ports for servers that start later."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable

import pytest

_next = itertools.count()


def in_time(limit: float, work: Callable[[], object], tries: int = 5) -> None:
    """Fails unless one of some tries takes less than ``limit`` seconds: a stall delays some of them, a defect all.
    ``work`` may measure itself, and return a number of seconds.
    """
    seconds: list[float] = []
    for _ in range(tries):
        start = time.monotonic()
        own = work()
        seconds.append(own if isinstance(own, float) else time.monotonic() - start)
        if seconds[-1] < limit:
            return
    pytest.fail(f"took {seconds} s, not {limit} s")


def free_port() -> int:
    """A port that nobody listens on, below those that the system gives to clients and to servers that ask for any: it
    is still free when a process that takes seconds to start binds it.
    """
    first = 10_000 + os.getpid() * 37 % 4_000
    while True:
        port = first + next(_next) % 900
        with socket.socket() as there:
            try:
                there.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
