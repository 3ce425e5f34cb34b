"""Accelerate: what ``save_state`` saves, in a `CheckpointStore` or with weights as ``.s4w`` files.

::

    from s4weights.adapters.accelerate import load_state, save_state

    first = load_state(accelerator, "runs/a") or 0
    ...
    save_state(accelerator, "runs/a", step)
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from .._load import load
from .._pending import Pending
from .._save import save
from ._common import Store, as_store, first_decides, newest, require
from ._folder import restore_folder, save_folder

require("accelerate", "1.1", "accelerate")

from accelerate.utils import broadcast_object_list  # noqa: E402

__all__ = ["load_state", "register_hooks", "save_state"]


def save_state(
    accelerator: Any,
    store: Store,
    step: int,
    *,
    metrics: Mapping[str, float] | None = None,
    tags: Mapping[str, str] | None = None,
    blocking: bool = True,
    **options: Any,
) -> Pending[Any] | None:
    """Saves what ``accelerator.save_state()`` saves as a checkpoint in a store.

    All processes must call it. They write to one folder, on one machine or shared, which the first
    process then saves. The folder is temporary or, with ``automatic_checkpoint_naming``,
    Accelerate's own, which is kept.

    Args:
        accelerator: the ``Accelerator``.
        store: a `CheckpointStore`, or its folder or URL. A `CheckpointStore` remembers what the
            previous save wrote, and need not read it back.
        step: the training step.
        metrics: as in `CheckpointStore.save_checkpoint`.
        tags: likewise.
        blocking: ``False`` saves in the background once the folder has been written and read.
        options: arguments of `CheckpointStore`, if ``store`` is not one.

    Returns:
        In the first process, with ``blocking=False``: the `PendingSave`. Otherwise ``None``.

    Raises:
        StorageError: in every process, if the store cannot be written.
        S4Error: any other failure.
    """
    kept = as_store(store, options)
    temporary = _agree(accelerator, lambda: tempfile.mkdtemp(prefix="s4weights-accelerate-"))
    pending: Pending[Any] | None = None

    def work() -> None:
        nonlocal pending
        how = {"metrics": metrics, "tags": tags}
        done = save_folder(kept, folder, step, blocking=blocking, **how)
        pending = None if blocking else done

    try:
        folder = accelerator.save_state(temporary)
        accelerator.wait_for_everyone()
        _agree(accelerator, work)
    finally:
        if accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
    return pending


def load_state(
    accelerator: Any, store: Store, step: int | None = None, **options: Any
) -> int | None:
    """Loads a checkpoint through ``accelerator.load_state()``. All processes must call it.

    Args:
        accelerator: the ``Accelerator``, after ``prepare``.
        store: as in `save_state`.
        step: which checkpoint; ``None``: the newest.
        options: arguments of `CheckpointStore`, if ``store`` is not one.

    Returns:
        The step; ``None`` if none was given and the store has no checkpoint yet.

    Raises:
        NotFoundError: in every process: there is no such checkpoint.
        CorruptDataError: likewise: the checkpoint, or one that it needs, is damaged.
    """
    kept = as_store(store, options)

    def work() -> tuple[int, str] | None:
        found = newest(kept) if step is None else step
        if found is None:
            return None
        folder = tempfile.mkdtemp(prefix="s4weights-accelerate-")
        try:
            restore_folder(kept, folder, found)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return found, folder

    restored = _agree(accelerator, work)
    if restored is None:
        return None
    found, folder = restored
    try:
        accelerator.load_state(folder)
        accelerator.wait_for_everyone()
    finally:
        if accelerator.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)
    return int(found)


def register_hooks(accelerator: Any, **options: Any) -> tuple[Any, Any]:
    """Makes ``accelerator.save_state`` write weights as ``model.s4w`` (``model_1.s4w``...), and
    ``load_state`` read them. Folders without such a file are loaded as before.

    Optimizers, schedulers and random states have no hook: Accelerate writes them with `torch.save`.

    Args:
        accelerator: the ``Accelerator``.
        options: arguments of `s4weights.save`, such as ``preset``.

    Returns:
        Two handles; ``remove()`` of each removes its hook.
    """

    def save_hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
        if accelerator.is_main_process:
            for number, state in enumerate(weights):
                save(state, _model_file(output_dir, number), **options)
        # Emptied in place: Accelerate itself writes what is left in the list.
        weights.clear()
        accelerator.wait_for_everyone()

    def load_hook(models: list[Any], input_dir: str) -> None:
        files = [_model_file(input_dir, number) for number in range(len(models))]
        if not files or not os.path.exists(files[0]):
            return
        for model, file in zip(models, files, strict=True):
            model.load_state_dict(load(file, "cpu"))
        models.clear()

    return (
        accelerator.register_save_state_pre_hook(save_hook),
        accelerator.register_load_state_pre_hook(load_hook),
    )


def _model_file(folder: str | os.PathLike[str], number: int) -> str:
    return os.path.join(os.fspath(folder), f"model_{number}.s4w" if number else "model.s4w")


def _agree(accelerator: Any, work: Callable[[], Any]) -> Any:
    return first_decides(work, accelerator.is_main_process, broadcast_object_list)
