"""What saves and loads did: a report of each, for logs, metrics and traces."""

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
    """What one save or load of this process did, or failed to do.

    Attributes:
        action: ``"save"``, ``"load"``, or ``"apply"`` (`s4weights.sync`, which publishes by saving).
        target: the file or store: a path, or a URL without secrets.
        step: the training step, of checkpoints.
        rank: of `torch.distributed.checkpoint`, what this rank did; ``None`` of anything else.
        raw_bytes: bytes of the tensors' values.
        stored_bytes: what they take where they are stored; of a delta that is loaded, without what
            it is a delta of. ``None`` if it is not known.
        chain: of loads, checkpoints down to the base, itself counted; of ``"apply"``, how many were
            read. ``None`` if it is not known.
        stages: seconds of each stage, in order: ``"stage"`` (copies for a save in the background),
            ``"encode"`` (uploads run meanwhile), ``"upload"`` (what is left of them), ``"publish"``;
            ``"open"``, ``"read"``, ``"apply"``.
        seconds: of all.
        error: what it failed with; ``None``: it did not.
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
        """How many times smaller it is than its values."""
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
    """Has a function called with the `Report` of every save and load of this process, at its end and on
    its thread. What it raises is logged and harms nothing. Returns what removes it again.
    """
    global _next
    if not callable(reporter):
        raise TypeError(f"reporter={reporter!r}: a function expected")
    with _lock:
        _next += 1
        number = _next
        _reporters[number] = reporter

    def remove() -> None:
        with _lock:
            _reporters.pop(number, None)

    return remove


class Recorder:
    """Measures one save or load. Each stage is an NVTX range as well, where a CUDA device is in use."""

    def __init__(
        self, action: Action, target: object, step: int | None = None, rank: int | None = None
    ) -> None:
        self._action, self._target, self.step, self._rank = action, _name(target), step, rank
        self._start = time.perf_counter()
        self._stages: dict[str, float] = {}
        self.raw_bytes = 0
        self.stored_bytes: int | None = None
        self.chain: int | None = None

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Something that takes time."""
        start = time.perf_counter()
        with _range(f"s4weights.{self._action}.{name}"):
            try:
                yield
            finally:
                seconds = time.perf_counter() - start
                self._stages[name] = self._stages.get(name, 0.0) + seconds

    def add(self, stages: Mapping[str, float]) -> None:
        """Stages that were measured elsewhere."""
        self._stages.update(stages)

    def look(self, reader: _core.Reader) -> None:
        """Takes sizes from what is read, if anybody wants to know."""
        if wanted():
            said = json.loads(reader.inspect())
            self.stored_bytes, self.chain = said["file_bytes"], said["chain"]

    def finish(self, error: BaseException | None = None) -> None:
        """Tells everybody."""
        if not wanted():
            return
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
        """A stage that others follow, if it does not fail."""
        try:
            with self.stage(name):
                yield
        except BaseException as error:
            self.finish(error)
            raise

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """The last thing that is done: then it is over, well or not."""
        try:
            yield
        except BaseException as error:
            self.finish(error)
            raise
        self.finish()


def wanted() -> bool:
    """Whether anybody wants to know."""
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
    # URLs with secrets in them are refused.
    named = isinstance(target, (str, os.PathLike))
    return os.fspath(target) if named else type(target).__name__  # type: ignore[call-overload]
