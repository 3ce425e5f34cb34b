"""Transformers: saves checkpoints of a ``Trainer`` in a `CheckpointStore`.

::

    from s4weights.adapters.transformers import StoreCallback, restore

    trainer = Trainer(..., callbacks=[StoreCallback("runs/a")])
    trainer.train(resume_from_checkpoint=restore("runs/a", "out"))
"""

from __future__ import annotations

import math
import os
import re
import shutil
from typing import Any

from .._pending import Pending
from ._common import Store, as_store, first_decides, load_found, require
from ._folder import save_folder, write_folder

require("transformers", "4.46", "transformers")

import torch.distributed as dist  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR  # noqa: E402

__all__ = ["StoreCallback", "restore"]

#: A file in a folder that `JITCheckpointCallback` has begun to write.
_INCOMPLETE = "checkpoint-is-incomplete.txt"


class StoreCallback(TrainerCallback):  # type: ignore[misc]
    """Saves each checkpoint folder of a ``Trainer`` to a store, mostly as deltas.

    With several processes, the first one saves when all have written their files. It must be able
    to read all of them: the folder must be on one machine, or shared.

    Args:
        store: a `CheckpointStore`, its folder or its URL.
        blocking: ``False`` saves in the background, once the folder has been read; the next save,
            or the end of the training, raises its error.
        keep_folders: ``False`` deletes each folder once it is in the store. `restore` restores it.
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
        self._saved = -1  # The step that was saved last.
        self._found: dict[int, int] = {}  # The folders of earlier runs, and when they were written.

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Called by the trainer.

        Raises:
            ValueError: an argument of the trainer, or a hyperparameter search, is not supported.
        """
        # Its own flag may be that of the checkpoint that is resumed from.
        if state.trial_params is not None:
            # Neither its arguments nor its state tell the folder of a trial. One of the same name may
            # be there from an earlier run, and one store would mix the trials.
            raise ValueError("StoreCallback: hyperparameter search is not supported; remove the callback")
        self._saved = -1
        if state.is_world_process_zero:
            self._found = _folders_in(args.output_dir)
        if args.load_best_model_at_end and not self.keep_folders:
            raise ValueError("load_best_model_at_end reads a checkpoint folder: set keep_folders=True")

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Called by the trainer, on every process, when it has written a checkpoint."""
        if args.world_size > 1:
            dist.barrier()
        if state.is_world_process_zero:
            self._save(args, state, state.global_step)

    def _save(self, args: Any, state: Any, step: int) -> None:
        self._finish()
        folder = _folder_of(args.output_dir, step)
        metrics = _metrics(state, step)
        done = save_folder(self.store, folder, step, blocking=self.blocking, metrics=metrics)
        self._saved = step
        self._folder = folder
        if self.blocking:
            self._finish()
        else:
            self._pending = done

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Called by the trainer: waits for the save in the background. A checkpoint that ``enable_jit_checkpoint``
        saved because the process is to end is only found here: `on_save` is not called for it.
        """
        if getattr(args, "enable_jit_checkpoint", False):
            if args.world_size > 1:
                dist.barrier()
            if state.is_world_process_zero:
                found = _folders_in(args.output_dir)
                new = [step for step, written in found.items() if self._found.get(step) != written]
                if new and max(new) > self._saved:
                    self._save(args, state, max(new))
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
    """Restore a checkpoint folder for ``trainer.train(resume_from_checkpoint=...)``.

    With several processes, all of them must call it, after creating their ``TrainingArguments``;
    the first one writes.

    Args:
        store: as in `StoreCallback`.
        output_dir: the ``output_dir`` of the ``TrainingArguments``.
        step: the training step. ``None`` means the newest checkpoint.
        options: as in `StoreCallback`.

    Returns:
        The folder, or ``None`` if no step is given and the store has no checkpoint yet.

    Raises:
        NotFoundError: the checkpoint does not exist.
        CorruptDataError: the checkpoint, or another one that it needs, is damaged.
    """
    many = dist.is_available() and dist.is_initialized()
    if not many and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError("restore: create TrainingArguments first, which initializes the process group")
    kept = as_store(store, options)

    def write() -> str | None:
        found = load_found(kept, step)
        if found is None:
            return None
        folder = _folder_of(output_dir, found[0])
        write_folder(found[1], folder, f"{kept.url}: step {found[0]}")
        return folder

    is_first = not many or dist.get_rank() == 0
    broadcast = dist.broadcast_object_list if many else lambda told: None
    folder: str | None = first_decides(write, is_first, broadcast)
    return folder


def _folder_of(output_dir: str | os.PathLike[str], step: int) -> str:
    return os.path.join(os.fspath(output_dir), f"{PREFIX_CHECKPOINT_DIR}-{step}")


def _folders_in(output_dir: str | os.PathLike[str]) -> dict[int, int]:
    """Return the steps of complete checkpoint folders, and when each was written."""
    found: dict[int, int] = {}
    for name in os.listdir(output_dir) if os.path.isdir(output_dir) else ():
        if (step := re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", name, re.ASCII)) is None:
            continue
        folder = os.path.join(output_dir, name)
        # Each save rewrites the state. The other file marks a folder that ``enable_jit_checkpoint`` has not finished.
        state = os.path.join(folder, "trainer_state.json")
        if os.path.exists(state) and not os.path.exists(os.path.join(folder, _INCOMPLETE)):
            found[int(step.group(1))] = os.stat(state).st_mtime_ns
    return found


def _metrics(state: Any, step: int) -> dict[str, float]:
    """The values that the trainer has logged for a step: losses, scores."""
    found: dict[str, float] = {}
    for logged in state.log_history:
        if logged.get("step") == step:
            found.update({k: v for k, v in logged.items() if type(v) in (int, float)})
    found.pop("step", None)
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}
