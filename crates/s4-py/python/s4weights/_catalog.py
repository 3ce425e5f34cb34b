"""Listing and maintenance: the methods of `CheckpointStore` that neither save nor load values."""

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
    """The checkpoints of a store. Subclasses determine how it is opened."""

    url: str
    retention: Retention | None

    @abstractmethod
    def _open(self, mode: str) -> _core.Store:
        """Return the native store, opening it if necessary."""

    @abstractmethod
    def _settle(self) -> None:
        """Wait for the background save, if any."""

    @abstractmethod
    def _watch(self, tracker: Progress) -> _core.Progress:
        """The function that native work calls while it runs."""

    def latest(self) -> int | None:
        """Return the step of the newest checkpoint, or ``None`` if there is no checkpoint or no store."""
        entry = self.latest_entry()
        return None if entry is None else entry.step

    def latest_entry(self) -> CheckpointEntry | None:
        """Return the newest checkpoint: the one that was saved last, whatever its step."""
        try:
            found = self._open("open").latest()
        except NotFoundError:
            return None
        return None if found is None else listed(json.loads(found))

    def list(self) -> Entries:
        """Return all checkpoints, from the oldest to the newest."""
        try:
            return [listed(item) for item in json.loads(self._open("open").list())]
        except NotFoundError:
            return []

    def delete(self, step: int | str) -> None:
        """Remove a checkpoint, or all checkpoints of a step, from the list. `gc` deletes the data later.

        Raises `ConflictError` if the checkpoint is pinned or if another checkpoint needs it. In the
        latter case, `rebase` the other checkpoint first.
        """
        self._settle()
        self._open("open").retire([entry.id for entry in self._all(step)], "deleted")

    def undelete(self, ids: str | Iterable[str]) -> Entries:
        """Put deleted checkpoints, and those removed by retention, back on the list, given their ids.

        The checkpoints that they are deltas of are put back as well. This works until `gc` has
        given up their data; after that, it raises `ConflictError`. Returns the entries put back.
        """
        self._settle()
        if not isinstance(ids, Iterable):
            raise TypeError(f"ids={ids!r}: expected checkpoint ids")
        wanted = [ids] if isinstance(ids, str) else [*ids]
        return [listed(item) for item in json.loads(self._open("open").unretire(wanted))]

    def pin(self, step: int | str) -> None:
        """Protect a checkpoint from deletion, including deletion by retention."""
        self._open("open").pin(self._all(step)[-1].id, True)

    def unpin(self, step: int | str) -> None:
        """Remove the protection that `pin` gave a checkpoint."""
        self._open("open").pin(self._all(step)[-1].id, False)

    def verify(self, step: int | str | None = None, *, read_data: bool = True) -> dict[str, Any]:
        """Check one checkpoint, all checkpoints of a step, or all checkpoints.

        Hashes are always checked. With ``read_data``, all values are read as well.

        Returns a report with the keys ``clean``; ``findings``, the damage found; ``unusable``, the
        checkpoints that need damaged data; and ``restores`` and ``does_not_restore``, which
        together list the ids of all checked checkpoints.
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
        """Delete the data of removed checkpoints and of saves that were never finished.

        The data of a removed checkpoint is deleted once it has been off the list for longer than
        ``grace``, which must be at least a day unless ``exclusive`` is true.

        Args:
            dry_run: only report what would be deleted.
            grace: time for running loads and saves to finish, in seconds or as a `timedelta`.
            exclusive: promise that nobody else is using the store, so that ``grace`` may be less
                than a day.
        """
        for name, flag in (("dry_run", dry_run), ("exclusive", exclusive)):
            check_flag(name, flag)
        seconds = grace.total_seconds() if isinstance(grace, timedelta) else grace
        check_seconds("grace", seconds)
        self._settle()
        report: dict[str, Any] = json.loads(self._open("open").sweep(seconds, exclusive, dry_run))
        return report

    def rebase(self, step: int | str, *, progress: ProgressArgument = None) -> CheckpointEntry:
        """Rewrite a delta as a base.

        The base replaces the delta once all values have been compared. After that, the former
        parent can be deleted.
        """
        self._settle()
        found = self._all(step)[-1]
        tracker = Progress(progress, found.raw_bytes, "rebase")
        try:
            return listed(json.loads(self._open("open").rebase(found.id, self._watch(tracker))))
        finally:
            tracker.close()

    def apply_retention(self, retention: Retention | int | None = None) -> Ids:
        """Remove from the list the checkpoints that a policy (by default the store's) does not keep.
        Return their ids.
        """
        policy = Retention.of(retention) or self.retention
        if policy is None:
            raise ValueError("no retention policy was passed, and the store has none")
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
        what = "no checkpoint" if step is None else f"no checkpoint for step {step}"
        return NotFoundError(2, what, self.url)
