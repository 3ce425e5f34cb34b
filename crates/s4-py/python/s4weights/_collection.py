"""Keeps the garbage collector from coming by while thousands of small objects are made."""

from __future__ import annotations

import gc


class NoCollection:
    """No collection, which many new objects set off: it looks at everything that PyTorch has made."""

    def __enter__(self) -> None:
        self._collects = gc.isenabled()
        gc.disable()

    def __exit__(self, *exception: object) -> None:
        if self._collects:
            gc.enable()
