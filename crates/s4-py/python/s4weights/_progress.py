"""Progress of a save or a load, in bytes of tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

ProgressArgument = bool | Callable[[int, int], object] | None

logger = logging.getLogger("s4weights")


class Progress:
    """Adapts the ``progress=`` argument: ``None``, ``True`` (a bar) or ``callable(done, total)``.

    An exception that the callable raises stops the work and propagates.
    """

    def __init__(self, argument: ProgressArgument, total: int, what: str) -> None:
        self._total = total
        self._base = 0
        #: Whether the function knows that all work is done.
        self._is_told = False
        self._bar: Any = None
        self._report: Callable[[int, int], object] | None = None
        if argument is None or argument is False:
            return
        if argument is True:
            self._report = self._open_bar(what)
        elif callable(argument):
            self._report = argument
        else:
            raise TypeError(f"progress: expected None, True or a callable, not {argument!r}")
        self._report(0, total)

    def native(self) -> Callable[[int], None] | None:
        """The function that native work calls with the bytes that it has processed so far."""
        return None if self._report is None else self._native

    def _native(self, done: int) -> None:
        if self._report is not None and done:
            now = min(self._base + done, self._total)
            self._report(now, self._total)
            self._is_told = now == self._total

    def advance(self, nbytes: int) -> None:
        """Called when native work has ended: the next work's reports are added to ``nbytes``."""
        self._base += nbytes

    def finish(self) -> None:
        """Report that all work is done. Must be called while an exception of the function can still stop the work."""
        if self._report is not None:
            self._report(self._total, self._total)

    def finish_late(self) -> None:
        """Like `finish`, after the work took effect: an error of the function is logged."""
        try:
            if not self._is_told:
                self.finish()
        except Exception:
            logger.exception("the progress function failed after the save was done")

    def close(self) -> None:
        """Remove the bar, whether the work succeeded or not."""
        if self._bar is not None:
            self._bar.close()

    def _open_bar(self, what: str) -> Callable[[int, int], object]:
        try:
            from tqdm.auto import tqdm  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            return _LogTenths(what)
        self._bar = bar = tqdm(total=self._total, desc=what, unit="B", unit_scale=True)
        return lambda done, _total: bar.update(done - bar.n)


class _LogTenths:
    """``progress=True`` without tqdm: a log line for each tenth."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._tenth = 0

    def __call__(self, done: int, total: int) -> None:
        tenth = 10 * done // total if total else 10
        if tenth > self._tenth:
            self._tenth = tenth
            logger.info("%s: %d%% of %d bytes", self._what, 10 * tenth, total)
