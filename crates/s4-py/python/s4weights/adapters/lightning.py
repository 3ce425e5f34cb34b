"""Lightning: checkpoints of a ``Trainer`` as ``.s4w`` files, or in a `CheckpointStore`.

::

    from s4weights.adapters.lightning import StoreCheckpointIO

    trainer = Trainer(plugins=[StoreCheckpointIO("runs/a")])
    trainer.fit(model, ckpt_path="last")

Works with ``lightning``, and with ``pytorch_lightning`` if that is what a program has imported.
"""

from __future__ import annotations

import functools
import io
import json
import os
import sys
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from .._entries import CheckpointEntry
from .._errors import ConflictError, NotFoundError
from .._load import load
from .._pending import Pending
from .._save import save
from .._sources import is_url
from .._store import CheckpointStore
from ._common import Store, absolute, as_store, require, step_in

require("lightning", "2.4", "lightning", "pytorch-lightning")

import fsspec  # noqa: E402
import torch  # noqa: E402

try:
    if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
        raise ModuleNotFoundError
    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
except ModuleNotFoundError:
    from lightning_fabric.plugins.io.checkpoint_io import CheckpointIO

__all__ = ["FileCheckpointIO", "StoreCheckpointIO", "load_from_checkpoint"]

#: The most bytes of a file that stands for a checkpoint in a store.
_MARK_LIMIT = 64 << 10


class _Running(Protocol):
    """A save in the background."""

    def done(self) -> bool: ...

    def wait(self) -> object: ...


class _CheckpointIO(CheckpointIO):  # type: ignore[misc]
    """Runs one save at a time, and afterwards removes what Lightning wants removed."""

    def __init__(self, blocking: bool) -> None:
        self.blocking = blocking
        self.store: CheckpointStore | None = None
        self._running: _Running | None = None
        self._later: list[Callable[[], None]] = []

    def __getstate__(self) -> dict[str, Any]:
        # Background saves stay with this process.
        return {**self.__dict__, "_running": None, "_later": []}

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = "cpu",
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads the checkpoint at a path, which may also be one that `torch.save` wrote.

        Lightning passes no ``map_location``, and moves the values itself: they are loaded to the
        CPU, as by its own plugin. On the devices that they were saved on, the ranks of one machine
        would share a device, and a machine without that device could not load them.
        """
        self._settle()
        found: dict[str, Any] = _load(os.fspath(path), self.store, map_location, weights_only)
        return found

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes a checkpoint. While a save is running, which may replace it, this is postponed
        until that has succeeded.
        """
        self._later.append(functools.partial(self._remove, os.fspath(path)))
        if self._running is None or self._running.done():
            self._settle()

    def teardown(self) -> None:
        """Waits for the background save, and raises its error if it failed."""
        self._settle()

    def _settle(self) -> None:
        running, self._running = self._running, None
        later, self._later = self._later, []
        if running is not None:
            running.wait()  # If it failed, nothing is removed: the old one may be the newest left.
        for work in later:
            work()

    def _remove(self, path: str) -> None:
        fs, name = fsspec.core.url_to_fs(path)
        if os.path.islink(name):
            os.unlink(name)
        elif fs.exists(name):
            fs.rm(name, recursive=True)


class FileCheckpointIO(_CheckpointIO):
    """Checkpoints as ``.s4w`` files, under the paths that Lightning chooses.

    Args:
        blocking: ``False`` saves in the background; the next save, or the end of the training,
            raises its error.
        options: arguments of `s4weights.save`, such as ``preset``.
    """

    def __init__(self, *, blocking: bool = True, **options: Any) -> None:
        super().__init__(blocking)
        self._options = options

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        """Saves to a path or URL; ``storage_options`` are those of the object store."""
        self._settle()
        target = os.fspath(path)
        options = {**self._options}
        if storage_options is not None:
            options["storage_options"] = storage_options
        if not is_url(target):
            fs, target = fsspec.core.url_to_fs(target)
            fs.makedirs(os.path.dirname(target), exist_ok=True)
            if not _is_local(fs):
                with fs.transaction, fs.open(target, "wb") as file:
                    save(checkpoint, file, **options)
                return
        if self.blocking:
            save(checkpoint, target, **options)
        else:
            self._running = save(checkpoint, target, blocking=False, **options)


class StoreCheckpointIO(_CheckpointIO):
    """Checkpoints in a `CheckpointStore`, most as deltas of an earlier one.

    The paths that Lightning chooses get small files that name the checkpoints, so that
    ``ckpt_path="last"``, ``"best"`` or a path find them. What Lightning removes is deleted from the
    store, once no other checkpoint is a delta of it.

    Args:
        store: a `CheckpointStore`, or its folder or URL.
        blocking: ``False`` saves in the background; the next save, or the end of the training,
            raises its error.
        options: arguments of `CheckpointStore`, if ``store`` is not one.
    """

    store: CheckpointStore

    def __init__(self, store: Store, *, blocking: bool = True, **options: Any) -> None:
        super().__init__(blocking)
        self.store = as_store(store, options)
        self._unwanted: list[str] = []

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        """Saves as the checkpoint's ``global_step`` or, without one, the step that its path ends
        with.
        """
        if storage_options is not None:
            raise TypeError("storage_options: give them to the store")
        self._settle()
        name = os.fspath(path)
        step = checkpoint.get("global_step")
        step = step_in(name) if step is None else step
        replaced = self._marked(name)
        tags = {"path": name}
        if self.blocking:
            self._mark(self.store.save_checkpoint(checkpoint, step, tags=tags), name)
        else:
            # The file comes later, but Lightning may link to it at once.
            _make_folder(name)
            saved: Any = self.store.save_checkpoint(checkpoint, step, tags=tags, blocking=False)
            # With a runner: the save has ended, without an entry, once the runner has the file.
            running: Pending[Any] = getattr(saved, "_submission", saved)
            self._running = _Marking(
                running, lambda entry: self._mark(saved if entry is None else entry, name)
            )
        if replaced is not None:
            self._later.append(functools.partial(self._delete, replaced))
        if self.blocking:
            self._settle()

    def restore(self, folder: str | os.PathLike[str], step: int | None = None) -> str:
        """Writes the small file for a checkpoint of the store (the newest if no step is given), on
        a machine that does not have that file. Returns its path, for ``ckpt_path=``.
        """
        entry = self.store._find(step)
        path = os.path.join(os.fspath(folder), f"step={entry.step}.ckpt")
        self._mark(entry, path)
        return path

    def _mark(self, entry: CheckpointEntry, path: str) -> None:
        mark = _Mark(absolute(self.store.url), entry.id)
        fs, name = _make_folder(path)
        text = json.dumps({"s4weights": mark._asdict()}).encode()
        if not _is_local(fs):
            fs.pipe_file(name, text)
            return
        part = Path(f"{name}.{uuid.uuid4().hex}")
        part.write_bytes(text)
        os.replace(part, name)

    def _marked(self, path: str) -> str | None:
        """The id of the checkpoint of this store that a path stands for."""
        mark = None if os.path.islink(path) else _mark_at(path)
        return mark.id if mark is not None and mark.store == absolute(self.store.url) else None

    def _remove(self, path: str) -> None:
        id = self._marked(path)
        super()._remove(path)
        if id is not None:
            self._delete(id)

    def _delete(self, id: str) -> None:
        """Deletes a checkpoint, and those that could not be deleted earlier."""
        self._unwanted.append(id)
        for unwanted in reversed(self._unwanted.copy()):
            try:
                self.store.delete(unwanted)
            except ConflictError:
                continue  # Another one is a delta of it, or it is pinned.
            except NotFoundError:
                pass
            self._unwanted.remove(unwanted)


class _Marking:
    """A background save that ends once the file that names the checkpoint is written as well."""

    def __init__(self, pending: Pending[Any], mark: Callable[[Any], None]) -> None:
        self._pending, self._mark = pending, mark
        self._ended = threading.Event()
        self._error: BaseException | None = None
        pending.committed.add_done_callback(self._run)

    def _run(self, committed: Future[Any]) -> None:
        try:
            # Unlike `exception()`, this does not count as having seen the error.
            if Future.exception(committed) is None:
                self._mark(Future.result(committed))
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        self._pending.wait()
        self._ended.wait()
        if self._error is not None:
            raise self._error


def load_from_checkpoint(
    module: Any,
    path: str | os.PathLike[str],
    *,
    store: CheckpointStore | None = None,
    **arguments: Any,
) -> Any:
    """``module.load_from_checkpoint(path, **arguments)`` for what these classes have saved.

    Lightning's method would read the file itself, with `torch.load`. This passes it the checkpoint
    as a stream in host memory, which takes twice the checkpoint's size.

    Args:
        module: a `LightningModule` class.
        path: the path that Lightning chose for the checkpoint.
        store: the store that has the checkpoint, if it can only be opened with options.
        arguments: arguments of the method.
    """
    checkpoint = _load(os.fspath(path), store, "cpu", arguments.get("weights_only"))
    stream = io.BytesIO()
    torch.save(checkpoint, stream)
    stream.seek(0)
    return module.load_from_checkpoint(stream, **arguments)


class _Mark(NamedTuple):
    """The contents of a file that stands for a checkpoint in a store."""

    store: str
    id: str


def _mark_at(path: str) -> _Mark | None:
    fs, name = fsspec.core.url_to_fs(path)
    try:
        text = fs.cat_file(name, 0, _MARK_LIMIT)
    except (FileNotFoundError, IsADirectoryError):
        return None
    try:
        mark = json.loads(text)["s4weights"]
        return _Mark(str(mark["store"]), str(mark["id"]))
    except (ValueError, LookupError, TypeError):
        return None


def _load(
    path: str, store: CheckpointStore | None, map_location: Any, weights_only: bool | None
) -> Any:
    mark = _mark_at(path)
    if mark is None:
        fs, name = fsspec.core.url_to_fs(path)
        if _is_local(fs):
            return load(name, map_location, weights_only=weights_only)
        with fs.open(name, "rb") as file:
            return load(file, map_location, weights_only=weights_only)
    if store is None or absolute(store.url) != mark.store:
        store = CheckpointStore(mark.store, read_only=True)
    return store.load_checkpoint(mark.id, map_location, weights_only=weights_only)


def _make_folder(path: str) -> tuple[Any, str]:
    """Makes the folder that a file goes to; returns its file system, and the file's name there."""
    fs, name = fsspec.core.url_to_fs(path)
    fs.makedirs(os.path.dirname(name), exist_ok=True)
    return fs, name


def _is_local(fs: Any) -> bool:
    return isinstance(fs, fsspec.implementations.local.LocalFileSystem)
