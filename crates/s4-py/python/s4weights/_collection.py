"""Keeps the garbage collector from running while thousands of small objects are created."""

from __future__ import annotations

import gc


class NoCollection:
    """Suspends garbage collection. Many new objects would trigger it, and each run visits every
    object that PyTorch has created.
    """

    def __enter__(self) -> None:
        self._collects = gc.isenabled()
        gc.disable()

    def __exit__(self, *exception: object) -> None:
        if self._collects:
            gc.enable()
