"""What several adapters need."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Callable
from typing import Any

from .._store import CheckpointStore

#: Where an adapter may keep checkpoints: a store, or its folder or URL.
Store = CheckpointStore | str | os.PathLike[str]


def require(extra: str, minimum: str, *distributions: str) -> None:
    """Raises `ImportError` unless one of these packages is installed, of that version or later."""
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
    raise ImportError(f"{how}{has}: pip install 's4weights[{extra}]'")


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: ``2.6.1rc2`` is ``(2, 6, 1)``."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()


def as_store(store: Store, options: dict[str, Any]) -> CheckpointStore:
    """The store that an adapter was given, or the one that its arguments describe."""
    if isinstance(store, CheckpointStore):
        if options:
            raise TypeError(f"{', '.join(options)}: not allowed with an existing store")
        return store
    return CheckpointStore(store, **options)


def newest(store: CheckpointStore) -> int | None:
    """The newest step; what is being saved in the background is waited for."""
    store._settle()
    return store.latest()


def first_decides(
    work: Callable[[], Any], is_first: bool, broadcast: Callable[[list[Any]], object]
) -> Any:
    """Runs ``work`` in the first process; returns its result, or raises its error, in all of them.
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
    """The training step at the end of a path, as in ``checkpoint-500`` or ``epoch=1-step=20.ckpt``.

    Raises `ValueError` if there are no digits.
    """
    name = os.path.basename(os.fspath(path).rstrip("/"))
    found = re.search(r"(\d+)\D*$", name, re.ASCII)
    if found is None:
        raise ValueError(f"{os.fspath(path)!r}: a name that ends with the training step expected")
    return int(found.group(1))


def absolute(url: str) -> str:
    """A path as an absolute one; a URL as it is."""
    return url if "://" in url else os.path.abspath(url)
