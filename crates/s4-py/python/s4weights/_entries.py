"""What a store lists, and the rules for what it keeps."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint as the store lists it. It does not change, so any thread may use it.

    Attributes:
        step: the training step.
        id: names it, also among several of one step.
        bytes: what it takes in the store.
        raw_bytes: what its tensors take in memory.
        kind: ``"base"``, or ``"delta"`` of another checkpoint.
        parent: the ``id`` of that one.
        since_base: its number among those that share its base, which is 0.
        metrics: numbers that retention can choose by.
        tags: free text.
        pinned: whether it is protected.
        time: the writer's clock when it was saved, in seconds since 1970.
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
    #: Of a checkpoint that was just saved: sizes and times, and why it is a base.
    report: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


#: For the annotations of a class with a method that is called `list`.
Entries = list[CheckpointEntry]
Ids = list[str]


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay listed: those that any rule names, the newest one, pinned ones, and
    what they need. It does not change, so any thread may use it.

    Attributes:
        keep_last: the newest so many.
        keep_every: those whose step is a multiple of this.
        best: the best by metrics: name, how many, and ``"min"`` or ``"max"``.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    best: tuple[tuple[str, int, Literal["min", "max"]], ...] = ()

    def native_best(self) -> list[tuple[str, int, bool]]:
        """`best` as the native store takes it. Raises `ValueError` for another mode."""
        for _, _, mode in self.best:
            if mode not in ("min", "max"):
                raise ValueError(f'best: "min" or "max" expected, not {mode!r}')
        return [(metric, count, mode == "max") for metric, count, mode in self.best]


def listed(item: dict[str, Any], report: dict[str, Any] | None = None) -> CheckpointEntry:
    """What the native store says of a checkpoint."""
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
        raise ValueError(f"step: an integer of 0 or more, below 2^64, expected, not {step!r}")
    return number
