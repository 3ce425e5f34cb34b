"""Accelerate: the output of ``save_state`` in a `CheckpointStore`, or with weights as ``.s4w`` files.

::

    from s4weights.adapters.accelerate import load_state, save_state

    first = load_state(accelerator, "runs/a") or 0
    ...
    save_state(accelerator, "runs/a", step)
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from .._errors import ConflictError, S4Error, StorageError
from .._load import load
from .._pending import Pending
from .._save import save
from .._store import CheckpointStore
from ._common import Store, absolute, as_store, first_decides, load_found, require, settle
from ._folder import save_folder, write_folder

require("accelerate", "1.1", "accelerate")

from accelerate.utils import broadcast_object_list  # noqa: E402
from accelerate.utils.constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME  # noqa: E402

__all__ = ["load_state", "register_hooks", "save_state"]

_T = TypeVar("_T")

#: The stores that calls have named by a URL or a folder: for each accelerator, one for each URL and hash of
#: the options, which may be secret. The next call needs the same one: it knows of saves in the background,
#: and what the previous save wrote. They hold memory, so they go when the accelerator does.
_stores: weakref.WeakKeyDictionary[Any, dict[tuple[str, str], CheckpointStore]] = (
    weakref.WeakKeyDictionary()
)


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
    """Save the output of ``accelerator.save_state()`` as a checkpoint in a store.

    All processes must call it. They write to one folder, on one machine or shared, which the first
    process then saves. The folder is temporary or, with ``automatic_checkpoint_naming``,
    Accelerate's own folder, which is kept.

    Args:
        accelerator: the ``Accelerator``.
        store: a `CheckpointStore`, its folder or its URL. Calls with the same accelerator, folder or
            URL, and options share a `CheckpointStore` for as long as the accelerator exists.
        step: the training step.
        metrics: as in `CheckpointStore.save_checkpoint`.
        tags: as in `CheckpointStore.save_checkpoint`.
        blocking: ``False`` saves in the background once the folder has been written and read.
        options: arguments of `CheckpointStore`, if ``store`` is not one.

    Returns:
        The `PendingSave` in the first process if ``blocking=False``; otherwise ``None``. If the
        save fails and its result is never checked, the next call with this store raises its error.

    Raises:
        StorageError: the store cannot be written. Raised in every process.
        S4Error: any other failure.
    """
    _store_of(accelerator, store, options)  # Wrong arguments are an error before a folder is written.
    temporary = _agree(accelerator, lambda: tempfile.mkdtemp(prefix="s4weights-accelerate-"))
    pending: Pending[Any] | None = None

    def write(kept: CheckpointStore) -> None:
        nonlocal pending
        how = {"metrics": metrics, "tags": tags}
        done = save_folder(kept, folder, step, blocking=blocking, **how)
        pending = None if blocking else done

    def work() -> None:
        _with_store(accelerator, store, options, write)

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
    """Load a checkpoint with ``accelerator.load_state()``. All processes must call it.

    Args:
        accelerator: the ``Accelerator``, after ``prepare``.
        store: as in `save_state`.
        step: the training step. ``None`` means the newest checkpoint.
        options: arguments of `CheckpointStore`, if ``store`` is not one.

    Returns:
        The step, or ``None`` if none was given and the store has no checkpoint yet.

    Raises:
        NotFoundError: the checkpoint does not exist. Raised in every process.
        CorruptDataError: the checkpoint, or another one that it needs, is damaged. Raised in every
            process.
    """

    def read(kept: CheckpointStore) -> tuple[int, str] | None:
        found = load_found(kept, step)
        if found is None:
            return None
        private = tempfile.mkdtemp(prefix="s4weights-accelerate-")
        try:
            # Within the folder, which only this user may enter: it is not replaced by another one.
            write_folder(found[1], _within(private), f"{kept.url}: step {found[0]}")
        except BaseException:
            shutil.rmtree(private, ignore_errors=True)
            raise
        return found[0], private

    restored = _agree(accelerator, lambda: _with_store(accelerator, store, options, read))
    if restored is None:
        return None
    found, private = restored
    try:
        accelerator.load_state(_within(private))
        accelerator.wait_for_everyone()
    finally:
        if accelerator.is_main_process:
            shutil.rmtree(private, ignore_errors=True)
    return int(found)


def register_hooks(accelerator: Any, **options: Any) -> tuple[Any, Any]:
    """Make ``accelerator.save_state`` and ``load_state`` write and read weights as ``.s4w`` files.

    The files are ``model.s4w``, ``model_1.s4w`` and so on. Folders without such a file are loaded
    as before. Accelerate's own files with the same weights, from an earlier save to the folder, are
    deleted; loading a folder that has both raises an error.

    Optimizers, schedulers and random states have no hook: Accelerate writes them with `torch.save`.

    Args:
        accelerator: the ``Accelerator``.
        options: arguments of `s4weights.save`, such as ``preset``.

    Returns:
        Two handles. The ``remove()`` method of each removes its hook.
    """

    def save_hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
        each_node = accelerator.project_configuration.save_on_each_node
        if accelerator.is_local_main_process if each_node else accelerator.is_main_process:
            for number, state in enumerate(weights):
                save(state, _model_file(output_dir, number), **options)
                for stale in _theirs(output_dir, number):
                    os.unlink(stale)
        # Emptied in place: Accelerate itself writes what is left in the list.
        weights.clear()
        accelerator.wait_for_everyone()

    def load_hook(models: list[Any], input_dir: str) -> None:
        files = [_model_file(input_dir, number) for number in range(len(models))]
        if not files or not os.path.exists(files[0]):
            return
        for number in range(len(models)):
            for theirs in _theirs(input_dir, number):
                # One is of an earlier save, made with or without the hooks.
                raise ConflictError(f"both {files[number]} and {theirs} exist: delete the older one")
        for model, file in zip(models, files, strict=True):
            model.load_state_dict(load(file, "cpu"))
        models.clear()

    return (
        accelerator.register_save_state_pre_hook(save_hook),
        accelerator.register_load_state_pre_hook(load_hook),
    )


def _within(private: str) -> str:
    return os.path.join(private, "checkpoint")


def _model_file(folder: str | os.PathLike[str], number: int) -> str:
    return os.path.join(os.fspath(folder), f"model_{number}.s4w" if number else "model.s4w")


def _theirs(folder: str | os.PathLike[str], number: int) -> list[str]:
    """The files with the weights of this model that Accelerate itself wrote."""
    names = [SAFE_WEIGHTS_NAME, WEIGHTS_NAME]
    if number:
        names = [name.replace(".", f"_{number}.") for name in names]
    paths = [os.path.join(os.fspath(folder), name) for name in names]
    return [path for path in paths if os.path.lexists(path)]


def _with_store(
    accelerator: Any, store: Store, options: dict[str, Any], work: Callable[[CheckpointStore], _T]
) -> _T:
    """Call a function with the store that a call named. If the store was recreated since the previous call, the
    function gets the new one.
    """
    found = _store_of(accelerator, store, options)
    try:
        # An error of a background save is raised here: the data that it was to save is lost.
        settle(found)
    except S4Error as error:
        if found is not store and _is_replaced(error):
            found.close()
        raise
    is_old = found is not store and found._native is not None
    try:
        return work(found)
    except S4Error as error:
        if not is_old or not _is_replaced(error):
            raise
    found.close()
    return work(_store_of(accelerator, store, options))


def _is_replaced(error: S4Error) -> bool:
    """Whether a store was removed, and another one made in its place."""
    return isinstance(error, StorageError) and error.cause == "Replaced"


def _store_of(accelerator: Any, store: Store, options: dict[str, Any]) -> CheckpointStore:
    if isinstance(store, CheckpointStore):
        return as_store(store, options)
    kept = _stores.setdefault(accelerator, {})
    text = repr(sorted(options.items())).encode(errors="backslashreplace")
    key = absolute(os.fspath(store)), hashlib.sha256(text).hexdigest()
    found = kept.get(key)
    if found is not None and _is_gone(found):
        found.close()
    if found is None or found._closed:
        found = kept[key] = as_store(store, options)
    return found


def _is_gone(store: CheckpointStore) -> bool:
    """Whether the folder of a store was removed or recreated, and nobody needs the store any more."""
    if store._closed or store._native is None or "://" in store.url:
        return False
    pending = store._pending
    if pending is not None:
        committed = pending.committed
        # The next call is to raise an error that nobody has seen.
        if not committed.done() or (not committed._seen and Future.exception(committed)):
            return False
    return not store._outside and not os.path.exists(os.path.join(store.url, "repo.json"))


def _agree(accelerator: Any, work: Callable[[], Any]) -> Any:
    return first_decides(work, accelerator.is_main_process, broadcast_object_list)
