"""Transformers: checkpoints of a ``Trainer`` in a `CheckpointStore`.

::

    from s4weights.adapters.transformers import StoreCallback, restore

    trainer = Trainer(..., callbacks=[StoreCallback("runs/a")])
    trainer.train(resume_from_checkpoint=restore("runs/a", "out"))
"""

from __future__ import annotations

import math
import os
import shutil
from typing import Any

from .._pending import Pending
from ._common import Store, as_store, first_decides, newest, require
from ._folder import restore_folder, save_folder

require("transformers", "4.46", "transformers")

import torch.distributed as dist  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR  # noqa: E402

__all__ = ["StoreCallback", "restore"]


class StoreCallback(TrainerCallback):  # type: ignore[misc]
    """Saves each checkpoint folder of a ``Trainer`` to a store, most of it as deltas.

    With several processes, the first one saves when all have written their files. It must be able
    to read all of them: the folder is on one machine, or shared.

    Args:
        store: a `CheckpointStore`, or its folder or URL.
        blocking: ``False`` saves in the background, once the folder has been read; the next save,
            or the end of the training, raises its error.
        keep_folders: ``False`` deletes each folder once the store has it. `restore` brings it back.
        options: arguments of `CheckpointStore`, if ``store`` is not one.
    """

    def __init__(
        self, store: Store, *, blocking: bool = True, keep_folders: bool = True, **options: Any
    ) -> None:
        self.store = as_store(store, options)
        self.blocking = blocking
        self.keep_folders = keep_folders
        self._pending: Pending[Any] | None = None
        self._folder: str | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Called by the trainer."""
        if args.load_best_model_at_end and not self.keep_folders:
            raise ValueError("load_best_model_at_end reads a folder: set keep_folders=True")

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Called by the trainer, on every process, when it has written a checkpoint."""
        if args.world_size > 1:
            dist.barrier()
        if not state.is_world_process_zero:
            return
        self._finish()
        folder = _folder_of(args.output_dir, state.global_step)
        done = save_folder(
            self.store,
            folder,
            state.global_step,
            blocking=self.blocking,
            metrics=_metrics(state),
        )
        self._folder = folder
        if self.blocking:
            self._finish()
        else:
            self._pending = done

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Called by the trainer: waits for the save in the background."""
        self._finish()

    def _finish(self) -> None:
        pending, self._pending = self._pending, None
        folder, self._folder = self._folder, None
        if pending is not None:
            pending.wait()
        if folder is not None and not self.keep_folders:
            shutil.rmtree(folder, ignore_errors=True)


def restore(
    store: Store, output_dir: str | os.PathLike[str], step: int | None = None, **options: Any
) -> str | None:
    """Writes a checkpoint folder back, for ``trainer.train(resume_from_checkpoint=...)``.

    With several processes, all of them must call it, after creating their ``TrainingArguments``;
    the first one writes.

    Args:
        store: as in `StoreCallback`.
        output_dir: that of the ``TrainingArguments``.
        step: which checkpoint; ``None``: the newest.
        options: as in `StoreCallback`.

    Returns:
        The folder; ``None`` if no step is given and the store has no checkpoint yet.

    Raises:
        NotFoundError: there is no such checkpoint.
        CorruptDataError: the checkpoint, or one that it needs, is damaged.
    """
    many = dist.is_available() and dist.is_initialized()
    if not many and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError("restore: create TrainingArguments first; they connect the processes")
    kept = as_store(store, options)

    def write() -> str | None:
        found = newest(kept) if step is None else step
        if found is None:
            return None
        folder = _folder_of(output_dir, found)
        restore_folder(kept, folder, found)
        return folder

    is_first = not many or dist.get_rank() == 0
    broadcast = dist.broadcast_object_list if many else lambda told: None
    folder: str | None = first_decides(write, is_first, broadcast)
    return folder


def _folder_of(output_dir: str | os.PathLike[str], step: int) -> str:
    return os.path.join(os.fspath(output_dir), f"{PREFIX_CHECKPOINT_DIR}-{step}")


def _metrics(state: Any) -> dict[str, float]:
    """What the trainer has logged for this step: losses, scores."""
    found: dict[str, float] = {}
    for logged in state.log_history:
        if logged.get("step") == state.global_step:
            found.update({k: v for k, v in logged.items() if type(v) in (int, float)})
    found.pop("step", None)
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}
