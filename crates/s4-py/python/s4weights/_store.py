"""`CheckpointStore`: many checkpoints in a folder or a bucket."""

from __future__ import annotations

import functools
import json
import logging
import os
import pickle
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from typing import Any, Literal, overload

from . import _core, _live
from ._catalog import Catalog
from ._device import Compute, free_pinned_memory
from ._entries import CheckpointEntry, Retention, check_numbers, checked_step, labels_of, listed
from ._errors import CorruptDataError, UnsupportedFormatError
from ._load import check_pickle_arguments, read
from ._load import load as read_file
from ._pending import Deadline, HostBuffer, Pending, PendingSave, saving_here
from ._progress import Progress, ProgressArgument
from ._report import Recorder
from ._runner import RunnerClient
from ._save import Described, check_preset, describe, require_little_endian
from ._sources import absolute, check_flag, check_seconds, checked_options, texts_of
from ._staging import Budget, Stage, StagedValues, check_stage, stage_values, streams_behind
from ._storages import StorageWriter, copy_elsewhere
from ._torch import require_torch
from ._turn import Turn

logger = logging.getLogger("s4weights")

#: Stores inherited through a fork. Their threads do not exist in this process: they stay untouched.
_ABANDONED: list[_core.Store] = []
_stores: weakref.WeakSet[CheckpointStore] = weakref.WeakSet()


class CheckpointStore(Catalog):
    """The checkpoints of one or more runs, in a local folder or below a URL.

    Most checkpoints are stored as deltas of an earlier one, which is chosen so that a restore reads only a few
    checkpoints. A checkpoint is listed completely or not at all, and saved data is never changed. The first save
    creates the store if it does not exist.

    Several threads may call its methods at the same time: saves wait for each other, and `close` waits for them. A
    progress function (``progress=``), or a signal handler that runs during a save, must not save to the same store
    or close it: this raises `RuntimeError`. In a progress function that a background save calls, the methods that
    wait for that save raise it as well (`load_checkpoint`, `verify`, `delete`, `undelete`, `gc`, `rebase`); `list`
    and `latest` work. After a fork, the child opens its own connection, and background saves continue only in the
    parent process.

    If a background save fails, this is logged immediately, and the next call that waits for it (a save, a load or
    `close`) raises its error. If there is no such call, the process reports the failure on stderr when it exits,
    with a nonzero exit status. A ``with`` statement always closes the store.

    A store can be pickled and copied: the copy has the same arguments and its own connection. The pickle contains
    all arguments, including any secrets in ``storage_options``.

    Args:
        url: a folder or a URL such as ``s3://bucket/runs/a``.
        retention: which checkpoints stay listed after each save. ``None`` means all. An integer means
            ``Retention(keep_last=...)``.
        max_chain: maximum number of checkpoints that share a base, including the base (default: 16). 1 means only
            bases.
        max_hops: maximum number of deltas that restoring a checkpoint reads besides its base (default: 2). Each
            takes as long as the base, or up to twice as long. Fewer hops result in larger deltas: with 1, each is a
            delta of the base; with ``max_chain - 1``, of the previous checkpoint.
        preset: ``"fast"``, ``"balanced"`` or ``"small"``, which is currently the same as ``"balanced"``. The last
            two predict a delta's weights from the moments saved with them, so that loads read these moments, too.
        storage_options: settings of the object store, such as ``{"region": "eu-west-1"}``.
        threads: number of native threads. ``None`` means one per core.
        parent_memory: bytes of host memory for the values that later saves are deltas of (default: 1 GiB). These
            are the values of the base and of one more checkpoint for each further hop. They get equal shares and
            are compressed if necessary. Values that do not fit in their share are read back at every save. Values
            of CUDA devices count only if they are not kept in page-locked memory (``pinned_memory``). Samples for
            planning take up to half as much in addition, and a save takes about 250 MiB.
        bandwidth: limit for uploads, in bytes per second.
        allow_network_fs: allow a folder on a network file system.
        timeout: seconds for which a request that fails or gets no response is retried before the call fails
            (default: 300). It limits each request with its retries, and each commit, not a whole save.
        writers: how many processes may write to a newly created store: ``"many"``, which raises an error unless a
            test shows that the object store is safe for this, or ``"single"``, which is enforced by a lease.
        read_only: never write to the store. If its log is damaged, list the checkpoints that the rest of it proves.
        device: where to encode and decode tensors on CUDA devices, as in `save`. It does not change the stored
            data.
        gpu_scratch: as in `save`.
        pinned_memory: as in `save`. `close` returns idle memory to the system.
        staging_memory: bytes of host memory that background saves may use for values, copied or encoded, that have
            not been uploaded yet. ``None`` means no limit. Beyond the limit, the call blocks.
        device_reserve: bytes of memory on each CUDA device that copies leave free, in addition to memory that
            PyTorch had before and has returned. ``None`` means 1 GiB, or a tenth of the memory if that is more.
        runner: the socket of a runner (``s4w serve``), such as ``unix:///run/s4weights/s4w.sock``. Saves return a
            `RunnerSave` once the checkpoint is on the local drive and has been handed to the runner, which
            compresses, verifies and uploads it. Loads read from the nearest place that has the checkpoint. The
            runner determines where checkpoints are stored, the retention and the preset; ``url`` is used for
            listing and by the other methods.
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
        timeout: float | None = None,
        writers: str = "many",
        read_only: bool = False,
        device: str = "auto",
        gpu_scratch: int | None = None,
        pinned_memory: int | None = None,
        staging_memory: int | None = None,
        device_reserve: int | None = None,
        runner: str | None = None,
    ) -> None:
        self.url = absolute(url)
        options = checked_options(storage_options)
        # The arguments from which a copy is made.
        self._arguments: dict[str, Any] = {
            "url": self.url,
            "max_chain": max_chain,
            "max_hops": max_hops,
            "preset": preset,
            "storage_options": None if storage_options is None else options,
            "threads": threads,
            "parent_memory": parent_memory,
            "bandwidth": bandwidth,
            "allow_network_fs": allow_network_fs,
            "timeout": timeout,
            "writers": writers,
            "read_only": read_only,
            "device": device,
            "gpu_scratch": gpu_scratch,
            "pinned_memory": pinned_memory,
            "staging_memory": staging_memory,
            "device_reserve": device_reserve,
            "runner": runner,
        }
        if runner is not None and retention is not None:
            raise ValueError("retention: not supported with a runner; set `keep_last` in the runner's configuration")
        if timeout is not None:
            check_seconds("timeout", timeout, positive=True)
        self.runner = None if runner is None else RunnerClient(runner, timeout)
        # A new one for each call: the engines that it finds belong to one process.
        self._compute: Callable[[], Compute] = lambda: Compute(device, gpu_scratch, pinned_memory)
        scratch = self._compute().scratch
        self._budget = Budget(staging_memory, device_reserve, scratch).check()
        self.retention: Retention | None = Retention.of(retention)
        check_numbers(self._arguments)
        check_preset(preset)
        if writers not in ("many", "single"):
            raise ValueError(f"writers={writers!r}: expected 'many' or 'single'")
        self._read_only = read_only
        self._connect: Callable[[str], _core.Store] = lambda mode: _core.Store(
            self.url,
            "open_read_only" if read_only else mode,
            storage_options=options,
            preset=preset,
            threads=threads,
            max_chain=max_chain,
            max_hops=max_hops,
            parent_memory=parent_memory,
            bandwidth=bandwidth,
            allow_network_fs=allow_network_fs,
            timeout=timeout,
            writers=writers,
        )
        # Each of these is set atomically, without a lock: a signal handler may wait for saves
        # wherever it interrupts the main thread, even where that would be holding a lock.
        self._native: _core.Store | None = None
        self._closed = False
        # The fields below belong to whoever has the turn: for the duration of a save, or until a
        # background save has copied its tensors. A background save keeps the buffer until it ends.
        self._turn = Turn()
        self._pending: Pending[Any] | None = None
        self._outside: list[Pending[Any]] = []  # Saves that DCP runs; `close` waits for them.
        self._threads = threads
        self._spare: HostBuffer | None = None
        # For `finish_on_sigterm`: whether the main thread is in a save, and what to call after it.
        self._deadline = Deadline()
        self._saving_here = False
        self._used_devices = False
        self._after_save: Callable[[], object] | None = None
        self._on_saved: list[Callable[[CheckpointEntry], object]] = []
        _stores.add(self)

    def __repr__(self) -> str:
        return f"CheckpointStore({self.url!r})"

    def __reduce__(self) -> tuple[Callable[..., CheckpointStore], tuple[dict[str, Any]]]:
        # A copy, in this process or another, is a separate store that connects when it is used.
        arguments = {**self._arguments, "retention": self.retention}
        return functools.partial(_make, type(self)), (arguments,)

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self.close()
            return
        try:
            self.close()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # The caller's own exception counts. (DCP's are no `Exception`s.)
            logger.exception("%s: a background save failed", self.url)

    def close(self) -> None:
        """Close the store.

        Waits for saves, including those of other threads, and raises the error of a background save
        that failed. The store cannot be used afterwards; loads in other threads continue.
        """
        with self._turn.take():
            try:
                if not self._closed:
                    # All of them have ended before the store is closed, whichever fails.
                    errors: list[BaseException | None] = []
                    try:
                        self._settle()
                    except Exception as error:
                        errors.append(error)
                    errors += [outside.committed.settle() for outside in [*self._outside]]
                    if found := [error for error in errors if error is not None]:
                        raise found[0]
            finally:
                self._closed = True
                self._native, self._spare = None, None
                if self._used_devices:
                    free_pinned_memory()

    def _abandon(self) -> None:
        """Close the store in a save that has ended; whoever waits for the save gets its error."""
        self._closed = True
        self._native, self._spare = None, None

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
        stage: Stage = ...,
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
        stage: Stage = ...,
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
        stage: Stage = "auto",
        progress: ProgressArgument = None,
        metadata: Mapping[str, str] | None = None,
        pickle_module: Any = pickle,
        pickle_protocol: int = 2,
    ) -> CheckpointEntry | PendingSave:
        """Save an object as the checkpoint of a training step.

        Only one save runs at a time: the next one waits for it, and raises its error if it failed.

        Args:
            state: any object that `save` supports.
            step: the training step, a non-negative integer. Several checkpoints may have the same step.
            metrics: finite numbers that a retention policy can use, by name.
            tags: arbitrary strings, by name.
            blocking: ``False`` returns once the values are staged, and saves in the background. If another writer's
                clean-up prevents such a save from being listed, it is not retried once the values may have changed.
            stage: with ``blocking=False``, how to preserve the values as of the call (see docs/staging.md).
                ``"device"`` copies values on CUDA devices into free device memory, which is freed as soon as they
                are encoded; if there is no room, this raises an error. ``"host"`` returns when they have been
                copied to page-locked host memory, up to ``gpu_scratch`` bytes of them to free device memory first, or
                encoded into host memory if it has no room for copies. Both also copy tensors in host memory.
                ``"lazy"`` returns immediately: the caller must not change or resize any tensor until all have been
                read, which `PendingSave.guard` waits for. ``"auto"`` is ``"device"`` if there is room, otherwise
                ``"host"`` with all the room that devices have: the tensors may change once the call returns.
            base: store a base instead of a delta.
            progress: as in `save`. A background save calls it on a separate thread.
            metadata: strings to store with the object, by name.
            pickle_module: as in `save`.
            pickle_protocol: as in `save`.

        Returns:
            The entry, a `PendingSave` if ``blocking=False``, or a `RunnerSave` with a runner.

        Raises:
            StorageError: the store cannot be written.
            ConflictError: another writer retired a checkpoint that this save needed, and the retry failed as well.
            S4Error: any other failure.
        """
        torch = require_torch("save_checkpoint")
        require_little_endian()
        check_stage(stage, blocking)
        if torch.serialization._serialization_tls.skip_data:
            raise UnsupportedFormatError("torch.serialization.skip_data: not supported by checkpoint stores")
        step = checked_step(step)
        torch.serialization._check_dill_version(pickle_module)
        begun: list[Pending[Any]] = []

        def begin(pending: Pending[Any]) -> None:
            # Before its thread starts: `close` and the next save wait for it in any case.
            begun.append(pending)
            self._pending = pending

        try:
            with saving_here(self), self._turn.take():
                self._settle()
                if self.runner is None:
                    return self._save(
                        *(begin, state, step, metrics, tags, blocking, base, stage, progress),
                        *(metadata, pickle_module, pickle_protocol),
                    )
                how = {**self._arguments, "stage": stage, "progress": progress}
                how |= {"metadata": metadata}
                how |= {"pickle_module": pickle_module, "pickle_protocol": pickle_protocol}
                save: Callable[..., Any] = self.runner.save
                return save(begin, state, step, metrics, tags, blocking, base, how)  # type: ignore[no-any-return]
        except BaseException:
            for pending in begun:
                pending._give_up()
            raise

    def _save(
        self,
        begin: Callable[[Pending[Any]], None],
        state: object,
        step: int,
        metrics: Mapping[str, float] | None,
        tags: Mapping[str, str] | None,
        blocking: bool,
        base: bool,
        stage: str,
        progress: ProgressArgument,
        metadata: Mapping[str, str] | None,
        pickle_module: Any,
        pickle_protocol: int,
    ) -> CheckpointEntry | PendingSave:
        recorder = Recorder("save", self.url, step)
        texts, (numbers, words) = texts_of("metadata", metadata), labels_of(metrics, tags)
        check_flag("base", base)

        def described(state: object, yields_gil: bool = False) -> tuple[StorageWriter, Described]:
            with recorder.failure():
                storages, about = describe(state, pickle_module, pickle_protocol, yields_gil)
            recorder.raw_bytes = storages.nbytes()
            return storages, about

        def save(
            about: Described,
            engine: _core.CudaEngine | None,
            tracker: Progress,
            sources: _core.Sources,
            pending: PendingSave | None = None,
            values: StagedValues | None = None,
        ) -> CheckpointEntry:
            # A blocking save has no `staged`: its values cannot change, so a retry may reread them.
            staged = None if pending is None else pending._finish_values
            reads_host, memory = (values.reads_host, values.upload_memory) if values else (False, None)
            if not reads_host and engine is None:
                staged = None
            try:
                native = self._open("open_or_create")
                watch = self._watch(tracker, pending)
                if pending is not None:
                    # Not before the store is open: its threads outlive this save.
                    pending._give_way()
                done = native.save(
                    step,
                    sources,
                    roles=about.roles,
                    tree=about.tree,
                    blobs=about.blobs,
                    metadata=texts,
                    metrics=numbers,
                    tags=words,
                    base=base,
                    callback=watch,
                    engine=engine,
                    staged=staged,
                    host_changes=reads_host,
                    staging_memory=memory,
                )
                tracker.finish_late()
            finally:
                tracker.close()
            said = json.loads(done)
            recorder.add({name: said["stages"][name] for name in ("encode", "upload", "publish")})
            entry = self._saved(said)
            recorder.stored_bytes = entry.bytes
            return entry

        def watched(*how: Any) -> CheckpointEntry:
            with recorder.watch():
                return save(*how)

        # A progress function gets the total first, so values are then described right away.
        lazily = stage == "lazy" and (progress is None or progress is False)
        if lazily and (it := self._save_lazily(begin, step, state, described, watched, recorder)):
            return it
        storages, about = described(state)
        tracker = Progress(progress, recorder.raw_bytes, "save")
        engine = storages.engine(self._compute())
        self._used_devices |= engine is not None
        if not blocking:
            later = functools.partial(watched, about, engine, tracker)
            return self._save_later(begin, step, storages, later, engine, stage, recorder)
        sources = storages.sources(engine)
        copies = copy_elsewhere(storages, sources, [n for n, _ in sources.on_host(elsewhere=True)])
        entry = watched(about, engine, tracker, sources)
        del copies
        return entry

    def _save_lazily(
        self,
        begin: Callable[[Pending[Any]], None],
        step: int,
        state: object,
        described: Callable[[object, bool], tuple[StorageWriter, Described]],
        save: Callable[..., CheckpointEntry],
        recorder: Recorder,
    ) -> PendingSave | None:
        """Describe the tensors in the background as well; return ``None`` if the state holds anything
        else that may change, or CUDA tensors that have no engine.
        """
        if (frozen := _core.freeze(state)) is None:
            return None
        # Only this list holds the copy, so that tensors can be freed once they have been read.
        copies, ordinals, frozen = [frozen[0]], frozen[1], None
        engine = self._compute().engine(ordinals) if ordinals else None
        if ordinals and engine is None:
            return None
        self._used_devices |= engine is not None
        pending = PendingSave(step, str(self.url))
        pending.stage = "lazy"
        buffer, self._spare = self._spare or HostBuffer(self._threads), None
        streams = {} if engine is None else streams_behind(engine, ordinals)

        def run() -> CheckpointEntry:
            try:
                storages, about = described(copies.pop(), True)
                with recorder.begin("stage"):
                    values = stage_values(storages, engine, "lazy", buffer, self._budget, streams)
                del storages
                pending._take(values)
                tracker = Progress(None, recorder.raw_bytes, "save")
                return save(about, engine, tracker, values.sources, pending, values)
            finally:
                self._spare = buffer

        begin(pending)
        pending._start(run)
        return pending

    def _save_later(
        self,
        begin: Callable[[Pending[Any]], None],
        step: int,
        storages: StorageWriter,
        save: Callable[[_core.Sources, PendingSave, StagedValues], CheckpointEntry],
        engine: _core.CudaEngine | None,
        stage: str,
        recorder: Recorder,
    ) -> PendingSave:
        pending = PendingSave(step, str(self.url))
        # If the copy fails, a GPU may still be writing to the buffer: it is not used again then.
        buffer, self._spare = self._spare or HostBuffer(self._threads), None
        with recorder.begin("stage"):
            values = stage_values(storages, engine, stage, buffer, self._budget)
        pending._take(values)

        def run() -> CheckpointEntry:
            try:
                return save(values.sources, pending, values)
            finally:
                # Before anyone learns that this save has ended.
                self._spare = buffer

        begin(pending)
        pending._start(run)
        pending._wait_returnable()
        return pending

    def _saved(self, done: dict[str, Any]) -> CheckpointEntry:
        report = {**done["report"], "stages": done["stages"], "why_base": done["why_base"]}
        entry = listed(done["checkpoint"], report)
        logger.debug("%s: saved step %d as a %s", self.url, entry.step, entry.kind)
        if self.retention is not None:
            try:
                self._retain(self.retention)
            except Exception as error:  # The checkpoint is safe; the next save tries again.
                logger.warning("%s: retention failed: %s", self.url, error)
        for tell in self._on_saved:
            tell(entry)
        return entry

    def _watch(self, tracker: Progress, pending: PendingSave | None = None) -> _core.Progress:
        report = tracker.native()

        def watch(done: int) -> None:
            self._deadline.check()
            if pending is not None:
                pending._check()
            if report is not None:
                report(done)

        return watch

    def load_checkpoint(
        self,
        step: int | str | None = None,
        map_location: Any = None,
        keys: Iterable[str] | None = None,
        *,
        fallback: bool = False,
        weights_only: bool | None = None,
        progress: ProgressArgument = None,
        pickle_module: Any = None,
        **pickle_load_args: Any,
    ) -> Any:
        """Load a checkpoint.

        Args:
            step: the training step. ``None`` means the newest checkpoint. The ``id`` of an entry selects
                one of several checkpoints of the same step.
            map_location: as in `torch.load`.
            keys: parts of the object to load, given as key paths such as ``"model"`` or
                ``"model.layers.0"``. The result contains only these parts, in the dicts that lead
                to them. Nothing else is read. ``None`` means the whole object.
            fallback: if the newest checkpoint is damaged, issue a warning and try the previous one,
                and so on. Only allowed without ``step``. (A runner always does this.)
            weights_only: as in `load`.
            progress: as in `save`.
            pickle_module: as in `load`.
            pickle_load_args: as in `load`.

        Raises:
            NotFoundError: the checkpoint does not exist.
            CorruptDataError: the checkpoint, or another one that it needs, is damaged.
            S4Error: any other failure.
        """
        require_torch("load_checkpoint")
        require_little_endian()
        check_pickle_arguments("load_checkpoint", pickle_module, pickle_load_args)
        check_flag("fallback", fallback)
        if fallback and step is not None:
            raise ValueError("fallback: finds the newest usable checkpoint, so do not pass a step")
        self._settle()
        if self.runner is not None:
            with self.runner.restored(step) as path:
                return read_file(
                    path,
                    map_location,
                    pickle_module,
                    weights_only=weights_only,
                    threads=self._threads,
                    device=self._arguments["device"],
                    gpu_scratch=self._arguments["gpu_scratch"],
                    progress=progress,
                    keys=keys,
                    **pickle_load_args,
                )
        native = self._open("open")
        # `load` may run several times; an iterator would be empty the second time.
        parts = [*keys] if isinstance(keys, Iterable) and not isinstance(keys, str) else keys

        def load(found: CheckpointEntry) -> Any:
            recorder = Recorder("load", self.url, found.step)
            with recorder.begin("open"):
                reader = native.open(found.id)
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
                recorder,
            )

        if not fallback:
            return load(self._find(step))
        first: CorruptDataError | None = None
        for entry in reversed(self.list()):
            try:
                return load(entry)
            except CorruptDataError as error:
                first = first or error
                warnings.warn(
                    f"{self.url}: step {entry.step} is damaged and was skipped: {error}",
                    UserWarning,
                    stacklevel=2,
                )
        raise first or self._nothing(None)

    def _open(self, mode: str) -> _core.Store:
        native = self._native
        if native is None and not self._closed:
            # Threads that get here at the same time each get a working store; one of them is kept.
            native = self._native = self._connect(mode)
        if self._closed:
            self._native = None
            raise ValueError(f"{self!r} is closed")
        assert native is not None
        return native

    def _in_child(self) -> None:
        """In the child after a fork: threads, running saves and their memory are the parent's."""
        if self._native is not None:
            _ABANDONED.append(self._native)
        self._native, self._pending, self._spare, self._outside = None, None, None, []
        self._turn = Turn()
        self._saving_here = False

    def _settle(self) -> None:
        """Wait for the background save, if any; raise its error if nobody has seen it."""
        if self._closed:
            raise ValueError(f"{self!r} is closed")
        pending = self._pending
        if pending is None:
            return
        if pending._runs_here():
            raise RuntimeError(
                "this would wait for the save that it is called from: a progress function can "
                "neither save to the same store nor load from it"
            )
        pending.committed.raise_unseen()

    def _drain(self, seconds: float) -> None:
        """Wait for running saves; those that have not ended in time are given up."""
        self._deadline.set(seconds)
        end = time.monotonic() + seconds + 5.0
        with self._turn.wait(seconds + 5.0) as waited:
            try:
                if not waited:
                    raise TimeoutError
                pending = [] if self._pending is None else [self._pending]
                for save in [*pending, *self._outside]:
                    save.committed.exception(max(0.0, end - time.monotonic()))
            except (TimeoutError, futures.TimeoutError):
                logger.error("%s: a save did not finish in time", self.url)
            finally:
                self._deadline.clear()


def _make(cls: type[CheckpointStore], arguments: dict[str, Any]) -> CheckpointStore:
    return cls(**arguments)


def _in_child() -> None:
    for store in _stores:
        store._in_child()


_live.at_fork(_in_child)
