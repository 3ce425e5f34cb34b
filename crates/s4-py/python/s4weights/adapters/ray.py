"""Ray Train: an upload function that saves the checkpoints reported by workers to stores.

::

    from s4weights.adapters.ray import StoreUpload, restored

    upload = StoreUpload("s3://bucket/run")
    ray.train.report(metrics, checkpoint=checkpoint, checkpoint_upload_fn=upload)

    with restored(ray.train.get_checkpoint()) as folder: ...
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._errors import NotFoundError
from .._store import CheckpointStore
from ._common import Store, absolute, as_store, require
from ._folder import restore_folder, save_folder

require("ray", "2.50", "ray")

import ray.train  # noqa: E402

__all__ = ["StoreUpload", "restored"]


class StoreUpload:
    """A ``checkpoint_upload_fn`` for ``ray.train.report`` that saves each reported folder to a store.

    Most of the data is stored as deltas. Ray only keeps a small folder that refers to the
    checkpoint.

    Each worker that reports checkpoints has its own store, ``rank-0`` and so on, below the URL.

    Args:
        store: the folder or URL below which the stores are, or a `CheckpointStore` there.
        options: arguments of `CheckpointStore`, if ``store`` is not one.
    """

    def __init__(self, store: Store, **options: Any) -> None:
        given = as_store(store, options)
        self._arguments = {
            **given._arguments,
            "url": absolute(given.url),  # Each worker has its own working directory.
            "retention": given.retention,
        }
        self._stores: dict[int, CheckpointStore] = {}
        self._steps: dict[int, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stores": {}}

    def __call__(self, checkpoint: Any, checkpoint_dir_name: str) -> Any:
        """Called by Ray, in each worker."""
        context = ray.train.get_context()
        rank = context.get_world_rank()
        store = self._stores.get(rank)
        if store is None:
            store = self._stores[rank] = _store_of(self._arguments, rank)
        with checkpoint.as_directory() as folder:
            # With a runner, the store lists only durable checkpoints.
            step = 1 + max(store.latest() or 0, self._steps.get(rank, 0))
            entry = save_folder(store, folder, step, tags={"name": checkpoint_dir_name})
        self._steps[rank] = step
        place = context.get_storage()
        path = f"{place.experiment_fs_path}/{checkpoint_dir_name}"
        place.storage_filesystem.create_dir(path, recursive=True)
        mark = {"store": store.url, "id": entry.id, "step": entry.step}
        with place.storage_filesystem.open_output_stream(f"{path}/{_name(rank)}") as file:
            file.write(json.dumps({"s4weights": mark}).encode())
        return ray.train.Checkpoint(path, filesystem=place.storage_filesystem)


@contextlib.contextmanager
def restored(checkpoint: Any, rank: int | None = None, **options: Any) -> Iterator[Path]:
    """Restore a folder reported by a worker to a temporary folder, given the checkpoint kept by Ray.

    Args:
        checkpoint: the checkpoint from ``ray.train.get_checkpoint()`` or from a result.
        rank: the rank of the worker that reported it. ``None`` means this worker's, or 0 if this worker
            reported nothing.
        options: arguments of `CheckpointStore` to open the store. Pass ``runner`` to find
            checkpoints that a runner has not made durable yet.

    Raises:
        NotFoundError: Ray's checkpoint does not refer to a checkpoint in a store, or the store does
            not contain it.
    """
    with checkpoint.as_directory() as kept, tempfile.TemporaryDirectory() as temporary:
        wanted = [rank] if rank is not None else [_this_rank(), 0]
        marks = [path for r in wanted if (path := Path(kept, _name(r))).exists()]
        if not marks:
            raise NotFoundError(2, "Ray's checkpoint does not point to a store", str(checkpoint.path))
        mark = json.loads(marks[0].read_text(encoding="utf-8"))["s4weights"]
        folder = Path(temporary, "checkpoint")
        with CheckpointStore(mark["store"], read_only=True, **options) as store:
            restore_folder(store, folder, mark["id"])
        yield folder


def _store_of(arguments: dict[str, Any], rank: int) -> CheckpointStore:
    return CheckpointStore(**{**arguments, "url": f"{arguments['url'].rstrip('/')}/rank-{rank}"})


def _this_rank() -> int:
    try:
        return int(ray.train.get_context().get_world_rank())
    except RuntimeError:
        return 0  # Outside of a worker.


def _name(rank: int) -> str:
    return f"s4weights-rank-{rank}.json"
