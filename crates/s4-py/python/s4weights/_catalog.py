"""Listing and maintenance: the part of `CheckpointStore` that neither saves nor loads values."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from . import _core
from ._entries import CheckpointEntry, Entries, Ids, Retention, listed, selected
from ._errors import NotFoundError
from ._progress import Progress, ProgressArgument
from ._sources import check_flag, check_seconds

_DAY = 24 * 3600.0

#: The tag of checkpoints that a runner published: the id that its client knows (`RunnerSave.id`).
_SUBMISSION = "s4w.submission"


class Catalog(ABC):
    """The checkpoints of a store. Subclasses decide how it is opened."""

    url: str
    retention: Retention | None

    @abstractmethod
    def _open(self, mode: str) -> _core.Store:
        """The native store, opened if need be."""

    @abstractmethod
    def _settle(self) -> None:
        """Waits for the background save, if any."""

    @abstractmethod
    def _watch(self, tracker: Progress) -> _core.Progress:
        """The function that native work calls while it runs."""

    def latest(self) -> int | None:
        """The step of the newest checkpoint; ``None`` if there is none, or no store yet."""
        entry = self.latest_entry()
        return None if entry is None else entry.step

    def latest_entry(self) -> CheckpointEntry | None:
        """The newest checkpoint: the one that was saved last, whatever its step."""
        try:
            found = self._open("open").latest()
        except NotFoundError:
            return None
        return None if found is None else listed(json.loads(found))

    def list(self) -> Entries:
        """All checkpoints, from the oldest to the newest."""
        try:
            return [listed(item) for item in json.loads(self._open("open").list())]
        except NotFoundError:
            return []

    def delete(self, step: int | str) -> None:
        """Takes a checkpoint, or all of a step, off the list. `gc` deletes the data later.

        Raises `ConflictError` if the checkpoint is pinned, or if another one needs it: `rebase`
        that other one first.
        """
        self._settle()
        self._open("open").retire([entry.id for entry in self._all(step)], "deleted")

    def undelete(self, ids: str | Iterable[str]) -> Entries:
        """Lists checkpoints again that were deleted, or that retention took off the list, by their
        ids, together with the ones that they are deltas of. This is possible until `gc` has given
        up their data, and raises `ConflictError` after that. Returns the entries listed again.
        """
        self._settle()
        if not isinstance(ids, Iterable):
            raise TypeError(f"ids={ids!r}: ids of checkpoints expected")
        wanted = [ids] if isinstance(ids, str) else [*ids]
        return [listed(item) for item in json.loads(self._open("open").unretire(wanted))]

    def pin(self, step: int | str) -> None:
        """Protects a checkpoint from deletion, including by retention."""
        self._open("open").pin(self._find(step).id, True)

    def unpin(self, step: int | str) -> None:
        """Ends the protection of a checkpoint by `pin`."""
        self._open("open").pin(self._find(step).id, False)

    def verify(self, step: int | str | None = None, *, read_data: bool = True) -> dict[str, Any]:
        """Checks one checkpoint, those of a step, or all: hashes, with ``read_data`` all values.

        Returns a report: ``clean``; ``findings``, what is damaged; ``unusable``, the checkpoints
        that need something damaged; ``restores`` and ``does_not_restore``, the ids of the checked
        checkpoints, each in one of the two lists.
        """
        check_flag("read_data", read_data)
        self._settle()
        only = [] if step is None else [entry.id for entry in self._all(step)]
        report: dict[str, Any] = json.loads(self._open("open").check(read_data, only))
        return report

    def gc(
        self,
        dry_run: bool = False,
        *,
        grace: timedelta | float = 7 * _DAY,
        exclusive: bool = False,
    ) -> dict[str, Any]:
        """Deletes the data of checkpoints that were taken off the list longer ago than ``grace``
        (at least a day, in seconds), and of saves that were never finished.

        Args:
            dry_run: only report what would be deleted.
            grace: time for running loads and saves to finish.
            exclusive: nobody else uses the store now, so ``grace`` may be less than a day.
        """
        for name, flag in (("dry_run", dry_run), ("exclusive", exclusive)):
            check_flag(name, flag)
        seconds = grace.total_seconds() if isinstance(grace, timedelta) else grace
        check_seconds("grace", seconds)
        self._settle()
        report: dict[str, Any] = json.loads(self._open("open").sweep(seconds, exclusive, dry_run))
        return report

    def rebase(self, step: int | str, *, progress: ProgressArgument = None) -> CheckpointEntry:
        """Rewrites a delta as a base, which replaces it once every value has been compared. After
        that its former parent can be deleted.
        """
        self._settle()
        found = self._find(step)
        tracker = Progress(progress, found.raw_bytes, "rebase")
        try:
            return listed(json.loads(self._open("open").rebase(found.id, self._watch(tracker))))
        finally:
            tracker.close()

    def apply_retention(self, retention: Retention | int | None = None) -> Ids:
        """Takes checkpoints off the list that a policy (by default the store's) does not keep.
        Returns their ids.
        """
        policy = Retention.of(retention) or self.retention
        if policy is None:
            raise ValueError("no retention was given, neither here nor to the store")
        return self._retain(policy)

    def _retain(self, policy: Retention) -> Ids:
        native = self._open("open")
        best = policy.native_best()
        return [*native.apply_retention(policy.keep_last, policy.keep_every, best, [])]

    def _find(self, step: int | str | None) -> CheckpointEntry:
        if step is None:
            entry = self.latest_entry()
            if entry is None:
                raise self._nothing(None)
            return entry
        return self._all(step)[-1]

    def _all(self, step: int | str) -> Entries:
        wanted = selected(step)
        found = [
            entry
            for entry in self.list()
            if wanted in (entry.step, entry.id, entry.tags.get(_SUBMISSION))
        ]
        if not found:
            raise self._nothing(step)
        return found

    def _nothing(self, step: int | str | None) -> NotFoundError:
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        return NotFoundError(2, what, self.url)
