"""Functions that several adapters share."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from .._errors import NotFoundError, StorageError
from .._load import load
from .._sources import is_url, path_of_url
from .._store import CheckpointStore, _stores

#: A place for an adapter's checkpoints: a store, or its folder or URL.
Store = CheckpointStore | str | os.PathLike[str]

#: Extensions of checkpoints. The digits in some of them are no training steps.
_EXTENSIONS = re.compile(r"(?:\.(?:s4w|ckpt|pt2?|pth|bin|safetensors|h5|keras|zip))+$")


def require(extra: str, minimum: str, *distributions: str) -> None:
    """Raise `ImportError` unless one of these packages is installed, of that version or later."""
    how = f"s4weights.adapters.{extra} needs {distributions[0]} {minimum} or later"
    found = None
    for distribution in distributions:
        try:
            found = f"{distribution} {importlib.metadata.version(distribution)}"
        except importlib.metadata.PackageNotFoundError:
            continue
        if _numbers(found.rpartition(" ")[2]) >= _numbers(minimum):
            return
    has = "" if found is None else f" ({found} is installed)"
    raise ImportError(f"{how}{has}: in a checkout, run pip install './crates/s4-py[{extra}]'")


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: ``2.6.1rc2`` is ``(2, 6, 1)``."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()


def as_store(store: Store, options: dict[str, Any]) -> CheckpointStore:
    """Return the store passed to an adapter, or the one described by its arguments."""
    if isinstance(store, CheckpointStore):
        if options:
            raise TypeError(f"{', '.join(options)}: not allowed with an existing store")
        return store
    return CheckpointStore(store, **options)


def load_found(store: CheckpointStore, step: int | None) -> tuple[int, Any] | None:
    """Return a checkpoint, loaded to the CPU, with its step. ``step=None`` means the newest one, if
    there is any. Waits for background saves to the same place, including those of other stores in
    this process, so that ``restore("runs/a")`` finds what ``StoreCallback("runs/a")`` saves.
    """
    settle(store)
    if step is None and store.runner is not None:
        # The store lists only durable checkpoints: only the runner knows which is the newest.
        with restored_file(store, None) as restored:
            if restored is None:
                return None
            return restored[0], load(restored[1], "cpu", threads=store._threads)
    if step is None:
        step = store.latest()
    return None if step is None else (step, store.load_checkpoint(step, "cpu"))


def settle(store: CheckpointStore) -> None:
    """Wait for background saves to the place of a store. Raises the error of the store's own one;
    those of other stores are for their users.
    """
    store._settle()
    here = place(store.url)
    # Another thread may make a store meanwhile: unlike the set, the list of references is copied in one step.
    for reference in [*_stores.data]:  # type: ignore[attr-defined]
        other = reference()
        pending = None if other is None or other is store else other._pending
        if other is None or pending is None or pending._runs_here() or place(other.url) != here:
            continue
        # Unlike its own `exception()`, this does not mark the error as seen.
        Future.exception(pending.committed)


def place(url: str) -> str:
    """The same text for all names of one folder, such as ``file:///x``, ``/x`` and links to it."""
    path = path_of_url(url) if is_url(url) else url
    return url.rstrip("/") if path is None else os.path.realpath(path)


def load_by_id(
    store: CheckpointStore, id: str, map_location: Any = "cpu", weights_only: bool | None = None
) -> Any:
    """Load the checkpoint of an id: the store's or, with a runner, that of its submission."""
    try:
        return store.load_checkpoint(id, map_location, weights_only=weights_only)
    except NotFoundError:
        if store.runner is None:
            raise
    # A runner knows only submissions, and those of other runners or of long ago not even by these ids.
    # The store lists them all, by both.
    with CheckpointStore(**{**store._arguments, "runner": None, "read_only": True}) as listed:
        return listed.load_checkpoint(id, map_location, weights_only=weights_only)


@contextlib.contextmanager
def restored_file(store: CheckpointStore, step: int | None) -> Iterator[tuple[int, Path] | None]:
    """A checkpoint as a file of the store's runner, with its step, or ``None`` if there is none.

    Raises:
        StorageError: this process does not see the file. That must not look as if there were no
            checkpoint: training would start over.
    """
    assert store.runner is not None
    with contextlib.ExitStack() as until_loaded:
        restored: tuple[int, Path] | None = None
        # Warnings are for the caller of the function that uses this as a context manager.
        with contextlib.suppress(NotFoundError):
            restored = until_loaded.enter_context(store.runner.restored_step(step, stacklevel=7))
        if restored is not None and not restored[1].exists():
            what = "the runner restored a checkpoint to a file that this process cannot see"
            raise StorageError(errno.ENOENT, what, str(restored[1]))
        yield restored


def first_decides(
    work: Callable[[], Any], is_first: bool, broadcast: Callable[[list[Any]], object]
) -> Any:
    """Run ``work`` in the first process; return its result, or raise its error, in all of them.
    ``broadcast`` fills the other processes' lists with the first one's.
    """
    outcome: list[Any] = [None, None]
    if is_first:
        try:
            outcome[0] = work()
        except Exception as error:
            outcome[1] = error
    broadcast(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def step_in(path: str | os.PathLike[str]) -> int:
    """Return the training step at the end of a path, as in ``checkpoint-500`` or ``epoch=1-step=20.ckpt``.

    Raises `ValueError` if there are no digits.
    """
    name = _EXTENSIONS.sub("", os.path.basename(os.fspath(path).rstrip("/")))
    found = re.search(r"(\d+)\D*$", name, re.ASCII)
    if found is None:
        raise ValueError(f"{os.fspath(path)!r}: expected a name that ends with the training step")
    return int(found.group(1))


def absolute(url: str) -> str:
    """A path as an absolute one; a URL as it is."""
    return url if "://" in url else os.path.abspath(url)
