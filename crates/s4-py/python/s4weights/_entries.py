"""The entries of a store, and the rules for which of them to keep."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ._errors import LimitError
from ._sources import check_flag, check_threads, texts_of


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint listed in a store. It is immutable, so any thread may use it.

    Attributes:
        step: the training step.
        id: identifies the checkpoint, even among several of one step.
        bytes: its size in the store.
        raw_bytes: the size of its tensors in memory.
        kind: ``"base"``, or ``"delta"`` of another checkpoint.
        parent: the ``id`` of that other checkpoint, or ``None`` for a base.
        since_base: its position among the checkpoints that share its base; 0 for the base.
        metrics: numbers that a retention policy can use.
        tags: free text.
        pinned: whether it is protected.
        time: when it was saved, by the writer's clock, in seconds since 1970.
    """

    step: int
    id: str
    bytes: int
    raw_bytes: int
    kind: Literal["base", "delta"]
    parent: str | None
    since_base: int
    metrics: dict[str, float]
    tags: dict[str, str]
    pinned: bool
    time: float
    #: For a checkpoint that was just saved: sizes and times, and why it is a base.
    report: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


#: For annotations in a class that has a method named `list`.
Entries = list[CheckpointEntry]
Ids = list[str]


@dataclass(frozen=True)
class Retention:
    """A retention policy.

    Checkpoints selected by any rule stay listed. So do the newest checkpoint, pinned checkpoints,
    and all checkpoints that these need. A policy is immutable, so any thread may use it.

    Attributes:
        keep_last: keep this many of the newest checkpoints.
        keep_every: keep checkpoints whose step is a multiple of this.
        best: keep the best checkpoints by metrics. Each rule consists of a metric's name, the
            number of checkpoints to keep, and ``"min"`` or ``"max"``.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    best: tuple[tuple[str, int, Literal["min", "max"]], ...] = ()

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            checked_number(name, getattr(self, name), 1)
        if not isinstance(self.best, (tuple, list)):
            what = 'expected a tuple of rules such as ("loss", 3, "min")'
            raise TypeError(f"best={self.best!r}: {what}")
        for rule in self.best:
            if not isinstance(rule, (tuple, list)) or len(rule) != 3 or type(rule[0]) is not str:
                what = 'expected tuples such as ("loss", 3, "min")'
                raise TypeError(f"best={self.best!r}: {what}")
            if rule[1] is None:
                raise TypeError(f"best={self.best!r}: expected a number of checkpoints, not None")
            checked_number("best", rule[1], 1)
            if rule[2] not in ("min", "max"):
                raise ValueError(f'best: expected "min" or "max", not {rule[2]!r}')

    @classmethod
    def of(cls, retention: Retention | int | None) -> Retention | None:
        """The policy for a ``retention`` argument: an integer means ``keep_last``."""
        if retention is None or isinstance(retention, cls):
            return retention
        if type(retention) is not int:
            raise TypeError(f"retention={retention!r}: expected an integer or a Retention")
        return cls(keep_last=retention)

    def native_best(self) -> list[tuple[str, int, bool]]:
        """`best` as the native store takes it."""
        return [(metric, count, mode == "max") for metric, count, mode in self.best]


def listed(item: dict[str, Any], report: dict[str, Any] | None = None) -> CheckpointEntry:
    """The entry for a checkpoint, from what the native store returns."""
    return CheckpointEntry(
        step=item["step"],
        id=item["id"],
        bytes=item["bytes"],
        raw_bytes=item["raw_bytes"],
        kind="base" if item["parent"] is None else "delta",
        parent=item["parent"],
        since_base=item["since_base"],
        metrics=item["metrics"],
        tags=item["tags"],
        pinned=item["pinned"],
        time=item["time_ms"] / 1000,
        report=report or {},
    )


def checked_number(name: str, value: object, least: int) -> None:
    """Raise unless the value is ``None`` or an integer of at least ``least``."""
    if value is None:
        return
    if type(value) is not int:
        raise TypeError(f"{name}={value!r}: expected an integer")
    if not least <= value < _STEPS:
        raise ValueError(f"{name}={value!r}: expected an integer of {least} or more")


def check_numbers(arguments: Mapping[str, object]) -> None:
    """Raise for numbers and flags that a store cannot work with."""
    check_threads(arguments["threads"])
    for name in ("read_only", "allow_network_fs"):
        check_flag(name, arguments[name])
    least = {"max_chain": 1, "bandwidth": 1, "max_hops": 1, "parent_memory": 0}
    for name, at_least in least.items():
        checked_number(name, arguments[name], at_least)


def numbers_of(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Metrics as they are stored."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(f"metrics={metrics!r}: expected a dict of numbers")
    numbers = {}
    for name, value in (metrics or {}).items():
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            kind = ValueError if isinstance(error, OverflowError) else type(error)
            raise kind(f"metrics: {name!r} is {value!r}, which is not a number that fits in a float") from error
        if not math.isfinite(number):
            raise ValueError(f"metrics: {name!r} is {number}, which is not finite")
        numbers[str(name)] = number
    return numbers


def labels_of(
    metrics: Mapping[str, float] | None, tags: Mapping[str, str] | None
) -> tuple[dict[str, float], dict[str, str]]:
    """Metrics and tags as they are stored. Raises if the store would refuse them: the
    store itself checks this only after it has uploaded the values.
    """
    numbers, texts = numbers_of(metrics), texts_of("tags", tags, convert=True)
    listed = json.dumps([numbers, texts], ensure_ascii=False, separators=(",", ":"))
    nbytes = len(listed.encode("utf-8", "surrogatepass"))
    if nbytes > _MOST_LISTED:
        raise LimitError(f"metrics and tags take {nbytes} bytes (at most {_MOST_LISTED} are allowed)")
    return numbers, texts


#: The most bytes of metrics and tags: an entry of a store's log may take a little more.
_MOST_LISTED = 64 << 10
#: Steps are stored in 64 bits.
_STEPS = 1 << 64


def checked_step(step: object) -> int:
    """A training step: an integer of any type, NumPy's and PyTorch's included."""
    try:
        if isinstance(step, bool):
            raise TypeError
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number < _STEPS:
        raise ValueError(f"step: expected a non-negative integer below 2^64, not {step!r}")
    return number


def selected(step: object) -> int | str:
    """A selector of checkpoints, checked: a step, or the id of an entry."""
    if isinstance(step, str):
        return step
    try:
        # `True` and 1.0 are equal to 1, but hardly meant as a step.
        if isinstance(step, bool):
            raise TypeError
        return operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        what = "an integer or the id of an entry"
        raise ValueError(f"step: expected {what}, not {step!r}") from None
