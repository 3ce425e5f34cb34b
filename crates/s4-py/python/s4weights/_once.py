"""Functions that save or load a single checkpoint without keeping the store open."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal, overload

from ._entries import CheckpointEntry
from ._pending import Pending, PendingSave
from ._progress import ProgressArgument
from ._staging import Stage
from ._store import CheckpointStore


@overload
def save_checkpoint(
    state: object,
    url: str | os.PathLike[str],
    step: int,
    metrics: Mapping[str, float] | None = ...,
    tags: Mapping[str, str] | None = ...,
    *,
    blocking: Literal[True] = ...,
    base: bool = ...,
    stage: Stage = ...,
    progress: ProgressArgument = ...,
    **store_options: Any,
) -> CheckpointEntry: ...


@overload
def save_checkpoint(
    state: object,
    url: str | os.PathLike[str],
    step: int,
    metrics: Mapping[str, float] | None = ...,
    tags: Mapping[str, str] | None = ...,
    *,
    blocking: Literal[False],
    base: bool = ...,
    stage: Stage = ...,
    progress: ProgressArgument = ...,
    **store_options: Any,
) -> PendingSave: ...


def save_checkpoint(
    state: object,
    url: str | os.PathLike[str],
    step: int,
    metrics: Mapping[str, float] | None = None,
    tags: Mapping[str, str] | None = None,
    *,
    blocking: bool = True,
    base: bool = False,
    stage: Stage = "auto",
    progress: ProgressArgument = None,
    **store_options: Any,
) -> CheckpointEntry | PendingSave:
    """Save one checkpoint to the store in a folder or at a URL. Creates the store if necessary.

    For a training loop, use a `CheckpointStore` instead: it keeps the last saved values in memory
    and raises the errors of background saves. ``store_options`` are the arguments of that class;
    ``blocking`` and ``stage`` are arguments of its `save_checkpoint`. This function may be called
    from several threads at the same time.
    """
    store = CheckpointStore(url, **store_options)
    if blocking:
        with store:
            return store.save_checkpoint(
                state, step, metrics, tags, base=base, stage=stage, progress=progress
            )
    pending = store.save_checkpoint(
        state, step, metrics, tags, blocking=False, base=base, stage=stage, progress=progress
    )
    # The result of a store with a runner has no future of its own.
    running: Pending[Any] = getattr(pending, "_submission", pending)
    running.committed.add_done_callback(lambda _: store._abandon())
    return pending


def load_checkpoint(
    url: str | os.PathLike[str],
    step: int | None = None,
    map_location: Any = None,
    keys: Iterable[str] | None = None,
    *,
    storage_options: Mapping[str, str] | None = None,
    threads: int | None = None,
    timeout: float | None = None,
    **options: Any,
) -> Any:
    """Load a checkpoint from the store in a folder or at a URL, as `CheckpointStore.load_checkpoint` does.

    ``storage_options``, ``threads`` and ``timeout`` are as in that class. This function may be
    called from several threads at the same time.
    """
    with CheckpointStore(
        url, storage_options=storage_options, threads=threads, timeout=timeout
    ) as store:
        return store.load_checkpoint(step, map_location, keys, **options)
