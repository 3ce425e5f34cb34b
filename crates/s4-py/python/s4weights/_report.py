"""Reports of what each save and load did, for logs, metrics and traces."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from . import _core, _live

logger = logging.getLogger("s4weights.report")

Action = Literal["save", "load", "apply"]


@dataclass(frozen=True)
class Report:
    """A report on a save or load in this process, successful or not.

    Attributes:
        action: ``"save"``, ``"load"`` or ``"apply"``. ``"apply"`` is an update of weights by
            `s4weights.sync`; publishing them is a ``"save"``.
        target: the file or store, as a path or as a URL without secrets.
        step: the training step, if the report is about a checkpoint.
        rank: the rank that the report is about, with `torch.distributed.checkpoint`; otherwise
            ``None``.
        raw_bytes: size of the tensors' values in bytes.
        stored_bytes: size of the values in the file or store; for a loaded delta, without its
            parent. ``None`` if unknown, for example if only a part is loaded.
        chain: for loads, the number of checkpoints in the chain; for ``"apply"``, the number of
            checkpoints read; for saves of a file, 1. ``None`` if unknown.
        stages: duration of each stage in seconds, in order: ``"stage"`` (copies for a background
            save), ``"encode"`` (uploads run meanwhile), ``"upload"`` (the rest of the uploads),
            ``"publish"``; ``"open"``, ``"read"``, ``"apply"``.
        seconds: total duration.
        error: the exception if the save or load failed; otherwise ``None``.
    """

    action: Action
    target: str
    step: int | None
    rank: int | None
    raw_bytes: int
    stored_bytes: int | None
    chain: int | None
    stages: Mapping[str, float]
    seconds: float
    error: BaseException | None

    @property
    def ratio(self) -> float | None:
        """The compression ratio, ``raw_bytes / stored_bytes``, or ``None`` if unknown."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else None

    def __str__(self) -> str:
        what = self.target if self.step is None else f"{self.target}: step {self.step}"
        rank = "" if self.rank is None else f" of rank {self.rank}"
        if self.error is not None:
            return f"{self.action}{rank} {what} failed after {self.seconds:.3f} s: {self.error}"
        stored = "" if self.stored_bytes is None else f", {self.stored_bytes:,} stored"
        ratio = "" if self.ratio is None else f" ({self.ratio:.2f}x)"
        chain = "" if not self.chain or self.chain == 1 else f", chain of {self.chain}"
        stages = ", ".join(f"{name} {seconds:.3f}" for name, seconds in self.stages.items())
        return (
            f"{self.action}{rank} {what}: {self.raw_bytes:,} bytes{stored}{ratio}{chain} in "
            f"{self.seconds:.3f} s ({stages})"
        )


Reporter = Callable[[Report], object]

_reporters: dict[int, Reporter] = {}
_lock = threading.Lock()
_next = 0


def _in_child() -> None:
    global _lock
    _lock = threading.Lock()


_live.at_fork(_in_child)


def add_reporter(reporter: Reporter) -> Callable[[], None]:
    """Register a function to call with a `Report` at the end of every save and load in this process.

    It is called on the thread of the save or load. Exceptions that it raises are logged and
    otherwise ignored. Returns a function that unregisters it.
    """
    global _next
    if not callable(reporter):
        raise TypeError(f"reporter={reporter!r}: expected a function")
    with _lock:
        _next += 1
        number = _next
        _reporters[number] = reporter

    def remove() -> None:
        with _lock:
            _reporters.pop(number, None)

    return remove


class Recorder:
    """Measures one save or load. If CUDA is in use, each stage is an NVTX range as well."""

    def __init__(
        self, action: Action, target: object, step: int | None = None, rank: int | None = None
    ) -> None:
        self._action, self._target, self.step, self._rank = action, _name(target), step, rank
        self._start = time.perf_counter()
        self._stages: dict[str, float] = {}
        self.raw_bytes = 0
        self.stored_bytes: int | None = None
        self.chain: int | None = None
        self._is_finished = False

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure a stage."""
        start = time.perf_counter()
        with _range(f"s4weights.{self._action}.{name}"):
            try:
                yield
            finally:
                seconds = time.perf_counter() - start
                self._stages[name] = self._stages.get(name, 0.0) + seconds

    def add(self, stages: Mapping[str, float]) -> None:
        """Add stages that were measured elsewhere."""
        self._stages.update(stages)

    def look(self, reader: _core.Reader, is_whole: bool = True) -> None:
        """Take the sizes from a reader, if anyone wants a report; ``is_whole`` says whether everything is read."""
        if wanted():
            said = json.loads(reader.inspect())
            self.stored_bytes, self.chain = said["file_bytes"] if is_whole else None, said["chain"]

    def finish(self, error: BaseException | None = None) -> None:
        """Log the report and pass it to all reporters. Only the first call counts."""
        if self._is_finished or not wanted():
            return
        self._is_finished = True
        report = Report(
            self._action,
            self._target,
            self.step,
            self._rank,
            self.raw_bytes,
            self.stored_bytes,
            self.chain,
            dict(self._stages),
            time.perf_counter() - self._start,
            error,
        )
        logger.info("%s", report)
        with _lock:
            reporters = [*_reporters.values()]
        for reporter in reporters:
            try:
                reporter(report)
            except Exception:
                logger.exception("a reporter failed")

    @contextlib.contextmanager
    def begin(self, name: str) -> Iterator[None]:
        """Measure a stage that is not the last. If it fails, that is reported."""
        with self.failure(), self.stage(name):
            yield

    @contextlib.contextmanager
    def failure(self) -> Iterator[None]:
        """Wrap work that is not the last. If it fails, that is reported."""
        try:
            yield
        except BaseException as error:
            self.finish(error)
            raise

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Wrap the rest of the work, and report its end, successful or not."""
        with self.failure():
            yield
        self.finish()


def wanted() -> bool:
    """Whether anyone wants reports."""
    return bool(_reporters) or logger.isEnabledFor(logging.INFO)


@contextlib.contextmanager
def _range(name: str) -> Iterator[None]:
    torch = sys.modules.get("torch")
    nvtx: Any = None
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        nvtx = torch.cuda.nvtx
    if nvtx is None:
        yield
        return
    nvtx.range_push(name)
    try:
        yield
    finally:
        nvtx.range_pop()


def _name(target: object) -> str:
    # URLs cannot contain secrets here: such URLs are rejected.
    named = isinstance(target, (str, os.PathLike))
    return os.fspath(target) if named else type(target).__name__  # type: ignore[call-overload]
