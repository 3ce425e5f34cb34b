"""The place of a distributed checkpoint: a store and a step."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from typing import Any

from . import _live
from ._sources import absolute, is_url
from ._store import CheckpointStore

#: A checkpoint's step: the digits that its id ends with, as in ``step-1000``.
_STEP = re.compile(r"(?:.*\D)?(\d+)$", re.ASCII | re.DOTALL)

#: Names whose last digits are no step: the end of a version, or a negative number.
_NO_STEP = re.compile(r"(\d\.|--)\d+$", re.ASCII)

#: Stores of this process, by process id, URL and options. The most recently used one is last.
_stores: list[tuple[tuple[int, str, dict[str, Any]], tuple[int, int] | None, CheckpointStore]] = []
_stores_lock = threading.Lock()
_MOST_STORES = 4


def _in_child() -> None:
    global _stores_lock
    _stores_lock = threading.Lock()


_live.at_fork(_in_child)


class Place:
    """A store and a step, from arguments and from DCP's ``checkpoint_id``."""

    def __init__(
        self,
        store: CheckpointStore | str | os.PathLike[str] | None,
        step: int | None,
        options: Mapping[str, Any],
    ) -> None:
        #: Whether the store was created here, from a URL.
        self._named = not isinstance(store, CheckpointStore)
        if isinstance(store, CheckpointStore):
            if options:
                raise TypeError(f"{', '.join(options)}: not allowed with an existing store")
            self._store: CheckpointStore | None = store
        else:
            self._store = None if store is None else _shared_store(absolute(store), options)
        self._given = store is not None
        self._options = dict(options)
        self.step = step
        #: The ``checkpoint_id`` that DCP passed, if it named both store and step.
        self._id: str | None = None
        #: Whether the ranks have begun to exchange: the first call of DCP within its exchange sets this.
        self.exchanging = False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None) -> None:
        """Set the place from a ``checkpoint_id`` of DCP: a name that ends with the step, below the
        path or URL of a store. If a store was given, only the step counts.
        """
        self.exchanging = False
        if checkpoint_id is None:
            return
        url = os.fspath(checkpoint_id)
        above, _, name = url.rstrip("/").rpartition("/")
        match = _STEP.match(name)
        if match is None or _NO_STEP.search(name):
            raise ValueError(f"checkpoint_id={url!r}: expected a name that ends with the step")
        self.step = int(match.group(1))
        if not self._given:
            above = absolute(above or ("/" if url.startswith("/") else "."))
            if self._store is None or self._store.url != above:
                self._store = _shared_store(above, self._options)
            self._id = url

    @property
    def id(self) -> str:
        """A ``checkpoint_id`` for this place; the store's URL if no step was given."""
        if self._id is not None:
            return self._id
        return self.store.url if self.step is None else f"{self.store.url}/step-{self.step}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled for a process that saves in the background: all writers there share one store.
        if self._store is None or self._named:
            url, options = None if self._store is None else self._store.url, self._options
        else:
            options = {**self._store._arguments, "retention": self._store.retention}
            url = options.pop("url")
        return _make, (url, self.step, options, self._given, self._id)

    @property
    def store(self) -> CheckpointStore:
        if self._store is None:
            raise ValueError("no store given: pass one, or a checkpoint_id such as 'runs/a/step-1000'")
        return self._store

    def __str__(self) -> str:
        return f"{self.store.url}: step {'newest' if self.step is None else self.step}"


def _make(
    url: str | None, step: int | None, options: Mapping[str, Any], given: bool, name: str | None
) -> Place:
    place = Place(url, step, options)
    place._given, place._id = given, name
    return place


def _shared_store(url: str, options: Mapping[str, Any]) -> CheckpointStore:
    """The store that all writers and readers of this process share if they name it alike: the next
    save needs what it keeps of the previous one.
    """
    key, mark = (os.getpid(), url, dict(options)), _mark(url)
    with _stores_lock:
        store = None
        for place, (known, seen, held) in enumerate(_stores):
            if known == key:
                del _stores[place]
                # If there was no store in the folder before, there must be one now if `held` was
                # used. Otherwise the folder was deleted.
                as_expected = is_url(url) or mark is not None or held._native is None
                if seen == mark if seen is not None else as_expected:
                    store = held
                break
        if store is None:
            store = CheckpointStore(url, **{"threads": _share_of_cores(), **options})
        _stores.append((key, mark, store))
        del _stores[:-_MOST_STORES]
        return store


def _share_of_cores() -> int | None:
    """Threads for one of several ranks on this machine, which torchrun counts: all of them save at
    the same time. ``None`` means the default.
    """
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(count) if count.isdecimal() else 1
    all_cores = os.cpu_count() or 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else all_cores
    # A rank may already be bound to cores of its own.
    return max(1, cores // ranks) if ranks > 1 and cores > all_cores // ranks else None


def _mark(url: str) -> tuple[int, int] | None:
    """Identify the store in a folder, to notice if it is replaced; return ``None`` if there is none."""
    if is_url(url):
        return None
    try:
        found = os.stat(os.path.join(url, "repo.json"))
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def is_id(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether a text names a store and a step."""
    try:
        text = os.fspath(checkpoint_id)
    except TypeError:
        return False
    text = text.rstrip("/")
    return _STEP.match(text) is not None and not _NO_STEP.search(text) and ("://" not in text or is_url(text))
