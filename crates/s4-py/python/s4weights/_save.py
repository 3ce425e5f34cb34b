"""`save`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple, overload

from . import _core, _live, _pickled
from ._device import Compute
from ._errors import S4Error, UnsupportedFormatError
from ._nvcomp import load_nvcomp
from ._pending import HostBuffer, PendingFile
from ._progress import Progress, ProgressArgument
from ._report import Recorder
from ._sources import (
    FileLike,
    check_threads,
    checked_options,
    is_url,
    path_of_url,
    texts_of,
)
from ._staging import Budget, Stage, check_stage, stage_values
from ._storages import StorageWriter, write_sources
from ._torch import OURS, call_original, is_called_by_torch, require_torch

logger = logging.getLogger("s4weights")

PRESETS = ("fast", "balanced", "small", "nvcomp")


@overload
def save(
    obj: object,
    f: FileLike,
    pickle_module: Any = ...,
    pickle_protocol: int = ...,
    _use_new_zipfile_serialization: bool = ...,
    _disable_byteorder_record: bool = ...,
    *,
    preset: str = ...,
    threads: int | None = ...,
    device: str = ...,
    gpu_scratch: int | None = ...,
    pinned_memory: int | None = ...,
    progress: ProgressArgument = ...,
    storage_options: Mapping[str, str] | None = ...,
    metadata: Mapping[str, str] | None = ...,
    blocking: Literal[True] = ...,
    stage: Stage = ...,
    staging_memory: int | None = ...,
    device_reserve: int | None = ...,
) -> dict[str, Any]: ...


@overload
def save(
    obj: object,
    f: FileLike,
    pickle_module: Any = ...,
    pickle_protocol: int = ...,
    _use_new_zipfile_serialization: bool = ...,
    _disable_byteorder_record: bool = ...,
    *,
    preset: str = ...,
    threads: int | None = ...,
    device: str = ...,
    gpu_scratch: int | None = ...,
    pinned_memory: int | None = ...,
    progress: ProgressArgument = ...,
    storage_options: Mapping[str, str] | None = ...,
    metadata: Mapping[str, str] | None = ...,
    blocking: Literal[False],
    stage: Stage = ...,
    staging_memory: int | None = ...,
    device_reserve: int | None = ...,
) -> PendingFile: ...


def save(
    obj: object,
    f: FileLike,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    _use_new_zipfile_serialization: bool = True,
    _disable_byteorder_record: bool = False,
    *,
    preset: str = "balanced",
    threads: int | None = None,
    device: str = "auto",
    gpu_scratch: int | None = None,
    pinned_memory: int | None = None,
    progress: ProgressArgument = None,
    storage_options: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
    blocking: bool = True,
    stage: Stage = "auto",
    staging_memory: int | None = None,
    device_reserve: int | None = None,
) -> dict[str, Any] | PendingFile:
    """Save an object as a ``.s4w`` file. Takes the arguments of `torch.save` and some more.

    The file appears complete or not at all; bytes already written to a stream cannot be taken back.

    This function may be called from several threads at the same time, even with the same path: the
    call that began last determines the file. If other threads change tensors in the meantime, each
    value may be saved as it was before or after the change.

    Args:
        obj: any object that `torch.save` supports. Arrays of JAX, CuPy and other libraries that
            support DLPack are converted to tensors if they are in plain containers.
        f: a path, a URL (``s3://bucket/key``) or a writable binary stream.
        pickle_module: the module that pickles objects other than plain values in plain containers.
        pickle_protocol: the pickle protocol; loading with ``weights_only=True`` expects 2.
        _use_new_zipfile_serialization: accepted for compatibility; there is only one format.
        _disable_byteorder_record: accepted for compatibility; files are always little-endian.
        preset: ``"fast"``, ``"balanced"`` or ``"small"``, which is currently the same as
            ``"balanced"``. ``"nvcomp"`` needs a GPU and nvCOMP, both for saving and for loading
            (with ``trusted=True``).
        threads: number of native threads. ``None`` means one per core.
        device: where to encode tensors on CUDA devices. ``"auto"`` and ``"cuda"`` encode on the
            device, so that only encoded bytes are copied to the host; ``"cpu"`` encodes on the
            host. If CUDA cannot be used, ``"auto"`` warns once and encodes on the host, and
            ``"cuda"`` raises an error. Other tensors are always encoded on the host. The file is
            the same in all cases.
        gpu_scratch: bytes of memory to use on each CUDA device while encoding, rounded down to a
            power of two. ``None`` means up to 768 MiB. At most an eighth of the free memory is
            used, except that the first 256 MiB may be up to half of it. ``stage="host"`` uses up
            to as much for copies instead.
        pinned_memory: limit, in bytes, on the page-locked host memory that this process uses for
            values from CUDA devices, either unchanged (``stage="host"``) or encoded. It applies
            from now on, to all devices and saves together. The memory is allocated when it is
            needed and kept for later saves (`free_pinned_memory` returns it to the system); a
            background save then allocates as much as the next one will need. If it is not enough,
            encoded values are copied to other memory. Half of it is reserved for values that later
            saves to a store are deltas of. ``None`` leaves the limit as it is: initially 8 GiB, or
            an eighth of the machine's memory if that is less.
        progress: ``True`` for a progress bar, or a callable that receives the number of bytes done
            and the total. If it raises an exception, the save is cancelled.
        storage_options: settings of the object store, such as ``{"region": "eu-west-1"}``.
        metadata: strings to store in the file, by name.
        blocking: ``False`` returns once the values are staged, and writes the file in the
            background. A stream is then written to from another thread. A file appears only after
            those of earlier calls in this process with the same path or URL: a later save, whether
            in the background or not, waits until they have ended, successfully or not, before it
            replaces the file.
        stage: with ``blocking=False``, how to preserve the values as of the call; see
            `CheckpointStore.save_checkpoint`.
        staging_memory: as in `CheckpointStore`, for copies of tensors in host memory and for
            encoded values that wait in page-locked memory.
        device_reserve: as in `CheckpointStore`.

    Returns:
        A report with sizes and times, or a `PendingFile` if ``blocking=False``.

    Raises:
        StorageError: the target cannot be written.
        S4Error: any other failure.
    """
    torch = require_torch("save")
    compute = Compute(device, gpu_scratch, pinned_memory)
    require_little_endian()
    skips_data = torch.serialization._serialization_tls.skip_data
    is_replaced = torch.save is not torch.serialization.save
    if is_replaced and (skips_data or is_called_by_torch()):
        # Parts of PyTorch's formats, and files without data, to be filled later, exist only in its
        # own.
        form = (_use_new_zipfile_serialization, _disable_byteorder_record)
        nothing: dict[str, Any] = call_original(
            "save", obj, f, pickle_module, pickle_protocol, *form
        )
        return nothing
    if skips_data:
        raise UnsupportedFormatError("torch.serialization.skip_data: not supported by .s4w files")
    torch.serialization._check_dill_version(pickle_module)
    check_stage(stage, blocking)
    check_preset(preset)
    f = absolute(f)
    budget = Budget(staging_memory, device_reserve, compute.scratch).check()
    texts = texts_of("metadata", metadata)
    start = time.perf_counter()
    recorder = Recorder("save", f)
    turn = InTurn(f)
    try:
        with turn.lock:
            turn.begin()
            storages, (tree, roles, blobs) = describe(obj, pickle_module, pickle_protocol)
            described = (tree, blobs, texts)
            nbytes = recorder.raw_bytes = storages.nbytes()
            tracker = Progress(progress, nbytes, "save")

            def write(writer: _core.Writer, values: Callable[[], None]) -> dict[str, Any]:
                with recorder.watch():
                    try:
                        try:
                            with recorder.stage("encode"):
                                values()
                            turn.wait()
                            if turn.pending is not None:
                                turn.pending._check()
                            # Before the file appears: what this raises cancels the save.
                            tracker.finish()
                            with recorder.stage("publish"):
                                report: dict[str, Any] = json.loads(writer.finish(*described))
                        except BaseException:
                            writer.abort()
                            raise
                    finally:
                        tracker.close()
                    recorder.stored_bytes, recorder.chain = report["bytes_out"], 1
                seconds = time.perf_counter() - start
                logger.debug("saved %d bytes of tensors in %.3f s: %s", nbytes, seconds, report)
                return report

            def open_writer() -> _core.Writer:
                try:
                    return new_writer(f, preset, threads, storage_options, roles)
                except BaseException:
                    tracker.close()
                    raise

            writer = open_writer()
            if blocking:
                return write(writer, lambda: storages.write(writer, tracker, compute))
            pending = PendingFile(os.fspath(f) if isinstance(f, (str, os.PathLike)) else repr(f))
            try:
                engine = storages.engine(compute)
                with recorder.stage("stage"):
                    values = stage_values(storages, engine, stage, HostBuffer(threads), budget)
            except BaseException:
                writer.abort()
                tracker.close()
                raise
            pending._take(values)

            def write_values() -> None:
                turn.begin_in_background()
                pending._give_way()
                ahead = sys.maxsize if values.upload_memory is None else values.upload_memory
                write_sources(writer, engine, values.sources, tracker, pending._check, ahead)
                pending._finish_values()

            turn.go_on(pending)
            pending._start(lambda: write(writer, write_values))
        pending._wait_returnable()
        return pending
    except BaseException as error:
        if turn.pending is not None:
            turn.pending._give_up()
        recorder.finish(error)
        raise
    finally:
        if turn.pending is None:
            turn.end()


# After `torch.save = s4weights.save`, this must not call itself.
setattr(save, OURS, True)


class InTurn:
    """The order of this process's saves to one path or URL. A file must not replace that of a save
    that began later, regardless of how long each save takes.

    An exception of a signal handler may keep any of these methods from being called. The order
    then depends on the lock, which cannot stay locked, and on the outcome of the background save.
    """

    def __init__(self, f: object) -> None:
        self._place = _place_of(f)
        self._earlier: list[InTurn] = []
        #: To be held by the call, with ``with``.
        self.lock = threading.RLock()
        #: The save, if it ends in the background.
        self.pending: PendingFile | None = None
        #: The thread that it runs on then.
        self._thread: int | None = None

    def begin(self) -> None:
        """Called with the lock held, before the object is looked at."""
        if self._place is None:
            return
        with _lock:
            running = _running.setdefault(self._place, [])
            # A save that begins within another one, in its progress function or in a signal
            # handler, must not wait: that one cannot go on meanwhile.
            within = any(save._runs_here() for saves in _running.values() for save in saves)
            self._earlier = [] if within else [*running]
            running.append(self)

    def go_on(self, pending: PendingFile) -> None:
        """Say that the save ends in the background."""
        self.pending = pending
        pending.committed.add_done_callback(lambda _: self.end())

    def begin_in_background(self) -> None:
        """Called on the thread of a background save."""
        self._thread = threading.get_ident()

    def _runs_here(self) -> bool:
        mine: bool = self.lock._is_owned()  # type: ignore[attr-defined]
        return mine or self._thread == threading.get_ident()

    def wait(self) -> None:
        """Wait until the saves that began earlier have ended."""
        for save in self._earlier:
            if save.pending is None:
                with save.lock:
                    pass
            if save.pending is not None:
                # Unlike that of a `SaveFuture`, this does not mark the error as seen.
                Future.exception(save.pending.committed)
            save.end()

    def end(self) -> None:
        """Called when the save has ended."""
        self._earlier.clear()
        with _lock:
            running = _running.get(self._place, [])
            if self in running:
                running.remove(self)
            if not running:
                _running.pop(self._place, None)


#: The saves that are running, by their targets, in the order in which they began. A signal handler
#: may begin one at any time, so its thread may already hold the lock.
_running: dict[object, list[InTurn]] = {}
_lock = threading.RLock()


def _in_child() -> None:
    global _lock
    _lock = threading.RLock()
    _running.clear()


_live.at_fork(_in_child)


def absolute(f: FileLike) -> FileLike:
    """A path in a form that does not depend on the working directory, which may have changed when
    the file is written. URLs and streams are left as they are.
    """
    if not isinstance(f, (str, os.PathLike)) or is_url(f):
        return f
    path = os.fspath(f)
    if not path or not isinstance(path, str):
        return f
    # Not `abspath`: what `link/..` is depends on where the link leads to.
    with contextlib.suppress(OSError):  # It no longer exists: writing the file will report that.
        path = os.path.join(os.getcwd(), path)
    return path


def _place_of(f: object) -> object:
    """Identify a path or URL; return ``None`` for a stream."""
    path = path_of_url(str(f)) if is_url(f) else f
    if path is None:
        return f
    if not isinstance(path, (str, os.PathLike)):
        return None
    try:
        return os.path.abspath(path)
    except OSError:  # The working directory no longer exists: writing the file will report that.
        return os.fspath(path)


class Described(NamedTuple):
    """The stored parts of an object besides its tensors."""

    #: As JSON, like the roles; ``None``: the object is not plain, and is pickled instead.
    tree: str | None
    roles: str | None
    blobs: dict[str, bytes]


def describe(
    obj: object, pickle_module: Any, protocol: int, yields_gil: bool = False
) -> tuple[StorageWriter, Described]:
    """The storages of an object, and the other stored parts of it. ``yields_gil``: nobody waits for
    this thread, so it lets others have the GIL from time to time.
    """
    storages, blobs = StorageWriter(), {}
    tree = storages.write_tree(obj, yields_gil)
    if tree is None:
        storages = StorageWriter()
        blobs["pickle"] = _pickled.dump(obj, storages, pickle_module, protocol)
    return storages, Described(tree, storages.find_roles(obj), blobs)


def check_preset(preset: str) -> None:
    """Raise `ValueError` for an unknown preset."""
    if preset not in PRESETS:
        raise ValueError(f"preset={preset!r}: expected one of {', '.join(PRESETS)}")


def new_writer(
    f: FileLike,
    preset: str,
    threads: int | None,
    storage_options: Mapping[str, str] | None,
    roles: str | None,
) -> _core.Writer:
    check_threads(threads)
    if preset == "nvcomp":
        load_nvcomp()
    options = checked_options(storage_options)
    if is_url(f):
        return _core.Writer(None, str(f), None, preset, threads, options, roles)
    if isinstance(f, (str, os.PathLike)):
        return _core.Writer(os.fspath(f), None, None, preset, threads, options, roles)
    if hasattr(f, "write"):
        return _core.Writer(None, None, f, preset, threads, options, roles)
    raise AttributeError(
        "expected 'f' to be string, path, or a file-like object with a 'write' attribute"
    )


def require_little_endian() -> None:
    if sys.byteorder != "little":
        raise S4Error("s4weights runs on little-endian machines only")
