"""`CheckpointStore`: many checkpoints in a folder or a bucket."""

from __future__ import annotations

import json
import logging
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, overload

from . import _core
from ._catalog import Catalog
from ._device import HOST, Compute, place
from ._entries import CheckpointEntry, Retention, listed
from ._errors import CorruptDataError, UnsupportedFormatError
from ._load import read
from ._pending import Deadline, HostBuffer, PendingSave
from ._progress import Progress, ProgressArgument
from ._roles import find_roles
from ._save import describe, require_little_endian

if TYPE_CHECKING:
    import torch

    from ._storages import StorageWriter

logger = logging.getLogger("s4weights")

#: Stores of a process that was forked: their threads stayed behind, so they are left as they are.
_ABANDONED: list[_core.Store] = []

class CheckpointStore(Catalog):
    """Checkpoints of one run, or of several, in a local folder or below a URL.

    Most are stored as their difference from an earlier one, so chosen that restoring reads few of
    them. Each is listed whole or not at all; what was saved is never changed. The first save
    creates the store if there is none.

    Args:
        url: a folder or a URL such as ``s3://bucket/runs/a``.
        retention: what stays listed after each save; ``None``: everything. An integer stands for
            ``Retention(keep_last=...)``.
        max_chain: most checkpoints that share one base, itself counted (16); 1 for bases only.
        max_hops: most differences that restoring one reads besides its base (2). Each takes as long
            as the base, or up to twice as long. Fewer make larger differences: with 1 all are from
            the base, with ``max_chain - 1`` each is from the checkpoint before.
        preset: ``"fast"``, ``"balanced"`` or ``"small"``.
        storage_options: settings of the object store, such as ``{"region": "eu-west-1"}``.
        threads: native threads; ``None`` means one for each core.
        parent_memory: bytes of host memory to keep values in that later saves are differences from
            (1 GiB): of the base, and of one checkpoint more for each further hop, in equal shares,
            compressed if need be. What does not fit its share is read back at every save. A save
            takes some 250 MiB besides.
        bandwidth: bytes a second that uploads may use.
        allow_network_fs: use a folder on a network file system all the same.
        device: where tensors on CUDA devices are encoded and decoded, as in `save`. What is stored is
            the same.
        gpu_scratch: as in `save`.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        retention: Retention | int | None = None,
        max_chain: int | None = None,
        max_hops: int | None = None,
        preset: str = "balanced",
        storage_options: Mapping[str, str] | None = None,
        threads: int | None = None,
        parent_memory: int | None = None,
        bandwidth: int | None = None,
        allow_network_fs: bool = False,
        device: str = "auto",
        gpu_scratch: int | None = None,
    ) -> None:
        self.url = os.fspath(url)
        # One for each call: what it finds is of one process.
        self._compute: Callable[[], Compute] = lambda: Compute(device, gpu_scratch)
        self._compute()
        if isinstance(retention, int):
            retention = Retention(keep_last=retention)
        self.retention: Retention | None = retention
        options = dict(storage_options or {})
        # Where the options stand in the native constructor is told here alone.
        self._connect: Callable[[str], _core.Store] = lambda mode: _core.Store(
            self.url,
            mode,
            options,
            preset,
            threads,
            max_chain,
            max_hops,
            parent_memory,
            bandwidth,
            allow_network_fs,
        )
        self._lock = threading.RLock()
        self._native: _core.Store | None = None
        self._pid = os.getpid()
        self._executor: ThreadPoolExecutor | None = None
        self._buffer = HostBuffer(threads)
        self._pending: PendingSave | None = None
        self._deadline = Deadline()
        self._saving_here = False
        self._after_save: Callable[[], object] | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"CheckpointStore({self.url!r})"

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self.close()
            return
        try:
            self.close()
        except Exception:  # The caller's own exception is the one that counts.
            logger.exception("%s: a save in the background failed", self.url)

    def close(self) -> None:
        """Waits for a save in the background, and raises what it failed with."""
        try:
            if not self._closed and self._pid == os.getpid():
                self._settle()
        finally:
            self._closed = True
            executor, self._executor = self._executor, None
            if executor is not None and self._pid == os.getpid():
                executor.shutdown()
            self._native = None
            self._buffer.free()

    @overload
    def save_checkpoint(
        self,
        state: object,
        step: int,
        metrics: Mapping[str, float] | None = ...,
        tags: Mapping[str, str] | None = ...,
        blocking: Literal[True] = ...,
        *,
        base: bool = ...,
        progress: ProgressArgument = ...,
        metadata: Mapping[str, str] | None = ...,
        pickle_module: Any = ...,
        pickle_protocol: int = ...,
    ) -> CheckpointEntry: ...

    @overload
    def save_checkpoint(
        self,
        state: object,
        step: int,
        metrics: Mapping[str, float] | None = ...,
        tags: Mapping[str, str] | None = ...,
        *,
        blocking: Literal[False],
        base: bool = ...,
        progress: ProgressArgument = ...,
        metadata: Mapping[str, str] | None = ...,
        pickle_module: Any = ...,
        pickle_protocol: int = ...,
    ) -> PendingSave: ...

    def save_checkpoint(
        self,
        state: object,
        step: int,
        metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        blocking: bool = True,
        *,
        base: bool = False,
        progress: ProgressArgument = None,
        metadata: Mapping[str, str] | None = None,
        pickle_module: Any = pickle,
        pickle_protocol: int = 2,
    ) -> CheckpointEntry | PendingSave:
        """Saves anything that `save` takes as the checkpoint of a training step.

        One save runs at a time: the next one waits for it, and raises what it failed with.

        Args:
            state: the object.
            step: the training step, 0 or more. Several checkpoints may have the same one.
            metrics: finite numbers that retention can choose by.
            tags: free text.
            blocking: ``False`` returns as soon as the tensors are copied, and saves in the
                background. The copy takes as much host memory as the state, which is used again.
                Tensors on CUDA devices are encoded instead, which takes the memory of what they
                become until it is uploaded; one that another writer's clean-up keeps from being
                listed then is not tried a second time.
            base: write no difference.
            progress: as in `save`; called from the background if that is where the save runs.
            metadata: free text to keep with the object.
            pickle_module: as in `save`.
            pickle_protocol: as in `save`.

        Returns:
            The entry; or a `PendingSave`.

        Raises:
            StorageError: the store cannot be written.
            ConflictError: another writer retired what was needed, and a second try did not help.
            S4Error: another of its kinds.
        """
        import torch

        require_little_endian()
        if torch.serialization._serialization_tls.skip_data:
            raise UnsupportedFormatError("torch.serialization.skip_data: checkpoints hold data")
        if type(step) is not int or step < 0:
            raise ValueError(f"step: an integer of 0 or more expected, not {step!r}")
        torch.serialization._check_dill_version(pickle_module)
        self._settle()
        storages, tree, stream = describe(state, pickle_module, pickle_protocol)
        groups, roles = find_roles(state, storages)
        blobs = {} if stream is None else {"pickle": stream}
        described = (tree, blobs, dict(metadata or {}), roles)
        numbers = {str(name): float(value) for name, value in (metrics or {}).items()}
        words = {str(name): str(value) for name, value in (tags or {}).items()}
        tracker = Progress(progress, storages.nbytes, "save")

        engine = storages.engine(self._compute())

        def save(
            sources: Sequence[_core.PlacedSource], staged: Callable[[], object] | None = None
        ) -> CheckpointEntry:
            try:
                native = self._open("open_or_create")
                watch = self._watch(tracker)
                done = native.save(
                    *(step, sources, groups, described, numbers, words, base, watch, engine),
                    staged,
                )
                tracker.finish()
            finally:
                tracker.close()
            return self._saved(json.loads(done))

        if not blocking:
            return self._save_later(step, storages, save, engine is not None)
        self._saving_here = threading.current_thread() is threading.main_thread()
        try:
            held, sources = _sources(storages, engine is not None)
            entry = save(sources)
            del held
            return entry
        finally:
            self._saving_here = False
            if self._after_save is not None:
                self._after_save()

    def _save_later(
        self,
        step: int,
        storages: StorageWriter,
        save: Callable[..., CheckpointEntry],
        on_gpu: bool,
    ) -> PendingSave:
        pending = PendingSave(step)
        entries = storages.entries()
        wheres = [_where(entry.storage, on_gpu) for entry in entries]
        copied = [e.storage for e, where in zip(entries, wheres, strict=True) if where == HOST]
        copies = iter(self._buffer.copy(copied))
        sources: list[_core.PlacedSource] = []
        for entry, where in zip(entries, wheres, strict=True):
            nbytes = entry.storage.nbytes()
            address = next(copies)[0] if where == HOST else entry.storage.data_ptr()
            address = address if nbytes else 0
            sources.append((entry.name, entry.dtype, entry.shape, address, nbytes, where))

        def staged() -> None:
            if not pending.staged.done():
                pending.staged.set_result(None)

        def run() -> None:
            try:
                pending.committed.set_result(save(sources, staged if on_gpu else None))
            except BaseException as error:
                pending.committed.set_exception(error)
            finally:
                staged()

        if not on_gpu:
            staged()
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "s4weights-save")
        self._pending = pending
        self._executor.submit(run)
        try:
            # The storages are alive, and nothing is queued on their streams, until then.
            pending.staged.result()
        except BaseException:
            # The caller goes on, with tensors that are being read.
            self._deadline.set(0.0)
            pending.committed.exception()
            self._deadline.clear()
            raise
        return pending

    def _saved(self, done: dict[str, Any]) -> CheckpointEntry:
        report = {**done["report"], "why_base": done["why_base"]}
        entry = listed(done["checkpoint"], report)
        logger.debug("%s: saved step %d as a %s", self.url, entry.step, entry.kind)
        if self.retention is not None:
            try:
                self._retain(self.retention)
            except Exception as error:  # The checkpoint is safe; the next save tries again.
                logger.warning("%s: retention failed: %s", self.url, error)
        return entry

    def _watch(self, tracker: Progress) -> _core.Progress:
        report = tracker.native()

        def watch(done: int) -> None:
            self._deadline.check()
            if report is not None:
                report(done)

        return watch

    def load_checkpoint(
        self,
        step: int | None = None,
        map_location: Any = None,
        keys: Iterable[str] | None = None,
        *,
        fallback: bool = False,
        weights_only: bool | None = None,
        progress: ProgressArgument = None,
        pickle_module: Any = None,
        **pickle_load_args: Any,
    ) -> Any:
        """Loads a checkpoint.

        Args:
            step: the training step; ``None``: the newest checkpoint. The ``id`` of an entry names
                one among several of a step.
            map_location: as in `torch.load`.
            keys: parts of the object, by key paths such as ``"model"`` or ``"model.layers.0"``:
                the dicts that lead there come back with nothing else in them, and nothing else is
                read. ``None``: everything.
            fallback: when the newest checkpoint is damaged, load the one before, and so on, and
                warn about it. Only without a step.
            weights_only: as in `load`.
            progress: as in `save`.
            pickle_module: as in `load`.
            pickle_load_args: as in `load`.

        Raises:
            NotFoundError: there is no such checkpoint.
            CorruptDataError: it, or one that it needs, is damaged.
            S4Error: another of its kinds.
        """
        require_little_endian()
        if fallback and step is not None:
            raise ValueError("fallback: only without a step, to find the newest that can be used")
        self._settle()
        native = self._open("open")
        # Read once: if there were several passes, an iterator would be empty for the second.
        parts = keys if keys is None or isinstance(keys, str) else [*keys]

        def load(id: str) -> Any:
            reader = native.open(id)
            arguments = dict(pickle_load_args)
            return read(
                reader,
                self._compute(),
                map_location,
                pickle_module,
                weights_only,
                progress,
                parts,
                arguments,
            )

        if not fallback:
            return load(self._find(step).id)
        first: CorruptDataError | None = None
        for entry in reversed(self.list()):
            try:
                return load(entry.id)
            except CorruptDataError as error:
                first = first or error
                warnings.warn(
                    f"{self.url}: step {entry.step} is damaged and was passed over: {error}",
                    UserWarning,
                    stacklevel=2,
                )
        raise first or self._nothing(None)

    def _open(self, mode: str) -> _core.Store:
        with self._lock:
            if self._closed:
                raise ValueError(f"{self!r} is closed")
            if self._pid != os.getpid():
                self._forget_parent_process()
            if self._native is None:
                self._native = self._connect(mode)
            return self._native

    def _forget_parent_process(self) -> None:
        """After a fork: threads stayed with the parent, and so did its save."""
        if self._native is not None:
            _ABANDONED.append(self._native)
        self._native, self._executor, self._pending = None, None, None
        self._pid = os.getpid()

    def _settle(self) -> None:
        """Waits for a save in the background; raises its error if nobody has seen it."""
        pending = self._pending
        if pending is None or self._pid != os.getpid():
            return
        seen = pending.committed.seen
        error = pending.committed.exception()
        self._pending = None
        if error is not None and not seen:
            raise error

    def _drain(self, seconds: float) -> None:
        """Waits for a save in the background, and lets it be given up when time is over."""
        pending = self._pending
        if pending is None:
            return
        self._deadline.set(seconds)
        try:
            pending.committed.exception(seconds + 5.0)
        except TimeoutError:
            logger.error("%s: the save of step %d did not end in time", self.url, pending.step)


def _where(storage: torch.UntypedStorage, on_gpu: bool) -> tuple[int, int]:
    """Where a storage is, if it is to be encoded there."""
    return place(storage) if on_gpu and storage.nbytes() else HOST


def _sources(
    storages: StorageWriter, on_gpu: bool
) -> tuple[list[Any], list[_core.PlacedSource]]:
    """Where the values of all storages are, those of other devices copied to host memory, and what
    keeps copies alive.
    """
    held: list[Any] = []
    sources: list[_core.PlacedSource] = []
    for entry in storages.entries():
        storage = entry.storage
        where = _where(storage, on_gpu)
        if storage.device.type != "cpu" and where == HOST:
            storage = storage.cpu()
            held.append(storage)
        nbytes = storage.nbytes()
        address = storage.data_ptr() if nbytes else 0
        sources.append((entry.name, entry.dtype, entry.shape, address, nbytes, where))
    return held, sources
