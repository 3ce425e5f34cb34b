"""Lightning: saves checkpoints of a ``Trainer`` as ``.s4w`` files or in a `CheckpointStore`.

::

    from s4weights.adapters.lightning import StoreCheckpointIO

    trainer = Trainer(plugins=[StoreCheckpointIO("runs/a")])
    trainer.fit(model, ckpt_path="last")

Works with ``lightning``, and with ``pytorch_lightning`` if the program has imported that.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shutil
import sys
import threading
import uuid
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from .._entries import CheckpointEntry
from .._errors import ConflictError, NotFoundError, StorageError
from .._load import load
from .._pending import Pending
from .._save import save
from .._sources import is_url
from .._store import CheckpointStore
from ._common import Store, absolute, as_store, load_by_id, require, restored_file, step_in

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

#: Launchers that start processes, such as ``ddp_spawn``, save weights under this name and load them in another process
#: immediately. They are not checkpoints.
_LAUNCHERS = ".temp.ckpt"

#: The most bytes of a file that stands in for a checkpoint in a store.
_MARK_LIMIT = 64 << 10


class _Running(Protocol):
    """A save in the background."""

    def done(self) -> bool: ...

    def wait(self) -> object: ...


class _CheckpointIO(CheckpointIO):  # type: ignore[misc]
    """Runs one save at a time, and then removes the checkpoints that Lightning wants to remove.

    Lightning assumes that a path exists once a save has returned: it links to it, and asks for it to
    choose the next name. So until a save in the background is done, its path has a small file that
    names the checkpoint before, which is loaded should the save fail or the process be killed. The
    first save has none before it, and is not done in the background. In an object store, there is no such file.
    """

    def __init__(self, blocking: bool) -> None:
        self.blocking = blocking
        self.store: CheckpointStore | None = None
        self._running: _Running | None = None
        self._later: list[Callable[[], None]] = []
        self._before: _Mark | None = None  # The checkpoint that was saved last.

    def __getstate__(self) -> dict[str, Any]:
        # Background saves stay with this process.
        return {**self.__dict__, "_running": None, "_later": []}

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = "cpu",
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load the checkpoint at a path, which may also have been written by `torch.save`.

        Lightning passes no ``map_location``, and moves the values itself: they are loaded to the
        CPU, as by its own plugin. On the devices that they were saved on, the ranks of one machine
        would share a device, and a machine without that device could not load them.
        """
        self._settle()
        found: dict[str, Any] = _load(os.fspath(path), self.store, map_location, weights_only)
        return found

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint. While a save is running, which may replace it, this is postponed
        until that has succeeded.
        """
        self._later.append(functools.partial(self._remove, os.fspath(path)))
        if self._running is None or self._running.done():
            self._settle()

    def teardown(self) -> None:
        """Wait for the background save, and raise its error if it failed."""
        self._settle()

    def _settle(self) -> None:
        running, self._running = self._running, None
        later, self._later = self._later, []
        if running is not None:
            running.wait()  # If it failed, nothing is removed: the old one may be the newest left.
        for work in later:
            work()

    def _hold_place(self, path: str) -> bool:
        """Before a save in the background begins: make its path exist, if it is a local one. Return
        whether it did not exist.
        """
        if not _is_local_path(path):
            return False
        fs, name = _make_folder(path)
        # A link to nothing does not exist, and is replaced. A file left by a killed process may
        # name a checkpoint that no longer exists.
        there = _mark_at(path) if fs.exists(name) else None
        free = there.pending if there is not None else not fs.exists(name)
        if free and self._before is not None:
            _write_mark(self._before._replace(pending=True), path)
        return there is None and free

    def _free_place(self, path: str) -> None:
        """Remove the file that held the place of a background save that has not even begun. Once the save's call has
        returned, Lightning may have linked to the path: the file then stays, even if the save fails.
        """
        with contextlib.suppress(OSError):
            mark = _mark_at(path)
            if mark is not None and mark.pending:
                _CheckpointIO._remove(self, path)

    def _remove(self, path: str) -> None:
        fs, name = fsspec.core.url_to_fs(path)
        if os.path.islink(name):
            os.unlink(name)
        elif fs.exists(name):
            fs.rm(name, recursive=True)
            for gone in (name, path):
                self._forget(_Mark("", absolute(gone)))

    def _forget(self, removed: _Mark) -> None:
        """Forget a removed checkpoint, such as that of Lightning's search for a learning rate: it cannot stand in for
        a later one.
        """
        if self._before == removed:
            self._before = None


class FileCheckpointIO(_CheckpointIO):
    """Checkpoints as ``.s4w`` files, under the paths that Lightning chooses.

    Args:
        blocking: ``False`` saves in the background, except for the first checkpoint; the next save,
            or the end of the training, raises its error.
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
        """Save to a path or URL; ``storage_options`` are those of the object store."""
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
        if os.path.basename(target) == _LAUNCHERS:
            save(checkpoint, target, **options)
            return
        part = target
        if not is_url(target) and os.path.islink(target):
            # Lightning's link to another checkpoint, which `save` would write to.
            part = f"{target}.{uuid.uuid4().hex}"

        def finish(done: object = None) -> None:
            if part != target:
                os.replace(part, target)
            self._before = _Mark("", absolute(target))

        if self.blocking or self._before is None:
            save(checkpoint, part, **options)
            finish()
        else:
            held = False
            try:
                held = self._hold_place(target)
                running = save(checkpoint, part, blocking=False, **options)
            except BaseException:
                if held:
                    self._free_place(target)
                raise
            self._running = _Marking(running, finish)


class StoreCheckpointIO(_CheckpointIO):
    """Checkpoints in a `CheckpointStore`, most as deltas of an earlier one.

    Small files at the paths that Lightning chooses refer to the checkpoints, so that
    ``ckpt_path="last"``, ``"best"`` or a path find them. Checkpoints that Lightning removes are
    deleted from the store, once no other checkpoint is a delta of them.

    Args:
        store: a `CheckpointStore`, or its folder or URL.
        blocking: ``False`` saves in the background, except for the first checkpoint; the next save,
            or the end of the training, raises its error.
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
        """Save under the checkpoint's ``global_step`` or, if it has none, the step at the end of
        the path. Without either, write it to the path as a ``.s4w`` file.
        """
        if storage_options is not None:
            raise TypeError("storage_options: pass them to the store")
        self._settle()
        name = os.fspath(path)
        step = checkpoint.get("global_step")
        if step is None:
            try:
                step = step_in(name)
            except ValueError:
                self._save_file(checkpoint, name)
                return
        replaced = self._marked(name)
        tags = {"path": name}
        if self.blocking or self._before is None:
            self._before = self._mark(self.store.save_checkpoint(checkpoint, step, tags=tags), name)
        else:
            held = False
            saved: Any
            try:
                held = self._hold_place(name)
                saved = self.store.save_checkpoint(checkpoint, step, tags=tags, blocking=False)
            except BaseException:
                if held:
                    self._free_place(name)
                raise
            # With a runner: the save has ended, without an entry, once the runner has the file.
            running: Pending[Any] = getattr(saved, "_submission", saved)

            def finish(entry: Any) -> None:
                self._before = self._mark(saved if entry is None else entry, name)

            self._running = _Marking(running, finish)
        if replaced is not None:
            self._later.append(functools.partial(self._delete, replaced))
        if self._running is None:
            self._settle()

    def _save_file(self, state: Any, path: str) -> None:
        """Save a state that is not a training checkpoint, such as the weights passed on by launchers."""
        fs, name = _make_folder(path)
        if _is_local(fs):
            save(state, name)
        else:
            with fs.open(name, "wb") as file:
                save(state, file)

    def restore(self, folder: str | os.PathLike[str], step: int | None = None) -> str:
        """Write the small file for a checkpoint of the store (the newest if no step is given), on
        a machine that does not have that file. Return its path, for ``ckpt_path=``. With a runner
        the file is the checkpoint itself: the newest may not be in the store yet.
        """
        if self.store.runner is not None:
            self._settle()
            with restored_file(self.store, step) as restored:
                if restored is None:
                    raise self.store._nothing(step)
                path = os.path.join(os.fspath(folder), f"step={restored[0]}.ckpt")
                os.makedirs(folder, exist_ok=True)
                part = f"{path}.{uuid.uuid4().hex}"
                try:
                    shutil.copyfile(restored[1], part)
                    os.replace(part, path)
                except BaseException:
                    with contextlib.suppress(OSError):
                        os.unlink(part)
                    raise
                return path
        entry = self.store._find(step)
        path = os.path.join(os.fspath(folder), f"step={entry.step}.ckpt")
        self._mark(entry, path)
        return path

    def _mark(self, entry: CheckpointEntry, path: str) -> _Mark:
        mark = _Mark(absolute(self.store.url), entry.id)
        _write_mark(mark, path)
        return mark

    def _marked(self, path: str) -> str | None:
        """The id of the checkpoint of this store that the file at a path stands in for."""
        mark = None if os.path.islink(path) else _mark_at(path)
        if mark is None or mark.pending or mark.store != absolute(self.store.url):
            return None
        return mark.id

    def _remove(self, path: str) -> None:
        id = self._marked(path)
        super()._remove(path)
        if id is not None:
            self._delete(id)

    def _delete(self, id: str) -> None:
        """Delete a checkpoint, and those that could not be deleted earlier."""
        self._unwanted.append(id)
        for unwanted in reversed(self._unwanted.copy()):
            if self._is_on_its_way(unwanted):
                continue  # The store does not list it yet.
            try:
                self.store.delete(unwanted)
            except ConflictError:
                continue  # Another one is a delta of it, or it is pinned.
            except NotFoundError:
                pass
            except StorageError as error:
                # Only the runner needs to be able to write to the store.
                if self.store.runner is None:
                    raise
                warnings.warn(f"could not delete {unwanted} from the store: {error}", UserWarning, stacklevel=2)
            self._unwanted.remove(unwanted)
            self._forget(_Mark(absolute(self.store.url), unwanted))

    def _is_on_its_way(self, id: str) -> bool:
        """Whether a runner has a checkpoint that is not in the store yet, as far as it can be asked."""
        if self.store.runner is None:
            return False
        try:
            return self.store.runner.look(id)["state"] not in ("durable", "failed")
        except NotFoundError:
            return False
        except StorageError:
            return True


class _Marking:
    """A background save that ends once the file at the checkpoint's path is in place as well."""

    def __init__(self, pending: Pending[Any], mark: Callable[[Any], None]) -> None:
        self._pending, self._mark = pending, mark
        self._ended = threading.Event()
        self._error: BaseException | None = None
        pending.committed.add_done_callback(self._run)

    def _run(self, committed: Future[Any]) -> None:
        try:
            # Unlike `exception()`, this does not mark the error as seen.
            if Future.exception(committed) is None:
                self._mark(Future.result(committed))
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        if not self._pending._abandoned:  # In a child after a fork, it would never end.
            self._ended.wait()
        self._pending.wait()
        if self._error is not None:
            raise self._error


def load_from_checkpoint(
    module: Any,
    path: str | os.PathLike[str],
    *,
    store: CheckpointStore | None = None,
    **arguments: Any,
) -> Any:
    """Call ``module.load_from_checkpoint(path, **arguments)`` for a checkpoint saved by these classes.

    Lightning's method reads the file itself, with `torch.load`. This function passes it the
    checkpoint as a stream in host memory, which takes twice the checkpoint's size.

    Args:
        module: a `LightningModule` class.
        path: the path of the checkpoint, as chosen by Lightning.
        store: the store that contains the checkpoint, if it can only be opened with options.
        arguments: arguments of the method.
    """
    checkpoint = _load(os.fspath(path), store, "cpu", arguments.get("weights_only"))
    stream = io.BytesIO()
    torch.save(checkpoint, stream)
    stream.seek(0)
    return module.load_from_checkpoint(stream, **arguments)


class _Mark(NamedTuple):
    """The contents of a file that stands in for a checkpoint in a store or, without a store, for
    the file of that name. While ``pending``, it names the previous checkpoint, until that of this
    path is saved.
    """

    store: str
    id: str
    pending: bool = False


def _write_mark(mark: _Mark, path: str) -> None:
    fs, name = _make_folder(path)
    about = mark._asdict()
    if not mark.pending:
        del about["pending"]
    text = json.dumps({"s4weights": about}).encode()
    if not _is_local(fs):
        fs.pipe_file(name, text)
        return
    part = Path(f"{name}.{uuid.uuid4().hex}")
    part.write_bytes(text)
    os.replace(part, name)


def _mark_at(path: str) -> _Mark | None:
    fs, name = fsspec.core.url_to_fs(path)
    try:
        text = fs.cat_file(name, 0, _MARK_LIMIT)
    except (FileNotFoundError, IsADirectoryError):
        return None
    try:
        mark = json.loads(text)["s4weights"]
        return _Mark(str(mark["store"]), str(mark["id"]), bool(mark.get("pending")))
    except (ValueError, LookupError, TypeError):
        return None


def _load(
    path: str, store: CheckpointStore | None, map_location: Any, weights_only: bool | None
) -> Any:
    mark = _mark_at(path)
    if mark is not None and mark.pending:
        warnings.warn(
            f"{path}: its save did not finish; loading the previous checkpoint, {mark.id}",
            UserWarning,
            stacklevel=3,
        )
    if mark is not None and not mark.store:
        path, mark = mark.id, None
    if mark is None:
        fs, name = fsspec.core.url_to_fs(path)
        if _is_local(fs):
            return load(name, map_location, weights_only=weights_only)
        with fs.open(name, "rb") as file:
            return load(file, map_location, weights_only=weights_only)
    if store is None or absolute(store.url) != mark.store:
        store = CheckpointStore(mark.store, read_only=True)
    return load_by_id(store, mark.id, map_location, weights_only)


def _make_folder(path: str) -> tuple[Any, str]:
    """Make the folder that a file goes to; return its file system, and the file's name there."""
    fs, name = fsspec.core.url_to_fs(path)
    fs.makedirs(os.path.dirname(name), exist_ok=True)
    return fs, name


def _is_local_path(path: str) -> bool:
    """Whether it is a path or a ``file:`` URL, determined without the library of an object store."""
    return fsspec.utils.get_protocol(path) in ("file", "local")


def _is_local(fs: Any) -> bool:
    return isinstance(fs, fsspec.implementations.local.LocalFileSystem)
