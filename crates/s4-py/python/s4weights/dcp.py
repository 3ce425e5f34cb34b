"""Storage for `torch.distributed.checkpoint` (DCP): distributed checkpoints in a `CheckpointStore`.

Each rank compresses its own shards on its own device, into its own objects; one entry of the store's
log lists the checkpoint when all of them are there. Consecutive checkpoints with the same sharding are
stored as deltas::

    import torch.distributed.checkpoint as dcp
    import s4weights.dcp

    dcp.save(state, storage_writer=s4weights.dcp.StorageWriter("s3://bucket/run", step=1000))
    dcp.load(state, storage_reader=s4weights.dcp.StorageReader("s3://bucket/run", step=1000))

What comes of it is a checkpoint like any other: retention, `verify` and the command line work on it,
and any number of ranks, with another sharding, can load it. Only the chunks that a rank needs are
decoded. Metadata is JSON; values that are not tensors are what DCP's planner makes of them, a pickle:
`LoadPlanner` loads these without running code, and `SavePlanner` makes JSON of most.

`save`, `async_save` and `load` are DCP's functions with all of this in place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from . import _core
from ._dcp_metadata import from_json, to_json
from ._dcp_planners import LoadPlanner, SavePlanner
from ._dcp_stager import Stager, device_copies
from ._device import HOST, Compute, Places
from ._entries import CheckpointEntry
from ._errors import CorruptDataError, NotFoundError, UnsupportedFormatError
from ._progress import Progress, ProgressArgument
from ._report import Recorder
from ._sources import is_url
from ._storages import dtype_name, read_batch
from ._store import CheckpointStore

__all__ = [
    "LoadPlanner",
    "SavePlanner",
    "Stager",
    "StorageReader",
    "StorageWriter",
    "async_save",
    "load",
    "save",
]

#: The blob that holds DCP's metadata.
_BLOB = "dcp"

#: A checkpoint's step: the digits that its id ends with, as in ``step-1000``.
_STEP = re.compile(r"(?:.*\D)?(\d+)$", re.ASCII | re.DOTALL)

#: Tags of checkpoints that ranks saved each on its own: whose, and how many there were.
_RANK, _RANKS = "dcp.rank", "dcp.ranks"

#: The groups of tensors that the store keeps in separate objects.
_WEIGHTS, _OPTIMIZER = 0, 1


#: Stores of this process, by what they were named, the one that was used last at the end.
_stores: list[tuple[tuple[int, str, dict[str, Any]], CheckpointStore]] = []
_stores_lock = threading.Lock()
_MOST_STORES = 4


class _Share(NamedTuple):
    """What a rank is told before it writes."""

    part_of: str
    rank: int


class _Stored(NamedTuple):
    """Where a rank put an item, and, with its first item, what the coordinator needs."""

    name: str
    part: bytes | None


class _Place:
    """A store and a step, from arguments and from DCP's ``checkpoint_id``."""

    def __init__(
        self,
        store: CheckpointStore | str | os.PathLike[str] | None,
        step: int | None,
        options: Mapping[str, Any],
    ) -> None:
        #: Whether the store was made of a URL.
        self._named = not isinstance(store, CheckpointStore)
        if isinstance(store, CheckpointStore):
            if options:
                raise TypeError(f"{', '.join(options)}: options of a store that is there already")
            self._store: CheckpointStore | None = store
        else:
            self._store = None if store is None else _shared_store(os.fspath(store), options)
        self._given = store is not None
        self._options = dict(options)
        self.step = step

    def reset(self, checkpoint_id: str | os.PathLike[str] | None) -> None:
        """Takes the place that a call of DCP names: a step, in a store that was given; or else the
        path or URL of a store, and below it a name that ends with the step.
        """
        if checkpoint_id is None:
            return
        url = os.fspath(checkpoint_id)
        above, _, name = url.rstrip("/").rpartition("/")
        match = _STEP.match(name)
        if match is None:
            raise ValueError(f"checkpoint_id={url!r}: a name that ends with the step expected")
        self.step = int(match.group(1))
        if not self._given:
            above = above or ("/" if url.startswith("/") else ".")
            if self._store is None or self._store.url != above:
                self._store = _shared_store(above, self._options)

    def __reduce__(self) -> tuple[Any, ...]:
        # A process that saves in the background keeps one store for all writers that it is given.
        if self._store is None or self._named:
            url, options = None if self._store is None else self._store.url, self._options
        else:
            options = {**self._store._arguments, "retention": self._store.retention}
            url = options.pop("url")
        return _place, (url, self.step, options, self._given)

    @property
    def store(self) -> CheckpointStore:
        if self._store is None:
            raise ValueError("no store: give one, or a checkpoint_id such as 'runs/a/step-1000'")
        return self._store

    def __str__(self) -> str:
        return f"{self.store.url}: step {'newest' if self.step is None else self.step}"


def _place(url: str | None, step: int | None, options: Mapping[str, Any], given: bool) -> _Place:
    place = _Place(url, step, options)
    place._given = given
    return place


def _shared_store(url: str, options: Mapping[str, Any]) -> CheckpointStore:
    """A store for all writers and readers of this process that name it alike: what it keeps of one save
    the next one needs.
    """
    key = (os.getpid(), url, dict(options))
    with _stores_lock:
        for place, (known, store) in enumerate(_stores):
            if known == key:
                _stores.append(_stores.pop(place))
                return store
        store = CheckpointStore(url, **options)
        _stores.append((key, store))
        del _stores[:-_MOST_STORES]
        return store


class StorageWriter(dcp.StorageWriter):  # type: ignore[misc]
    """Writes distributed checkpoints into a `CheckpointStore`.

    Every rank makes one, with the same arguments. It can be pickled, and be used for one save after
    the other; a save in the background of this process needs a writer of its own.

    Args:
        store: a `CheckpointStore`, or its folder or URL; ``None`` if each ``checkpoint_id`` names
            one, as in ``"s3://bucket/run/step-1000"``.
        step: the training step. A ``checkpoint_id`` that ends with digits takes its place.
        metrics: as in `CheckpointStore.save_checkpoint`. Those of the coordinating rank count, and
            so for ``tags`` and ``base``.
        tags: as there.
        base: write no delta.
        progress: as in `save`, of what rank 0 stores, on rank 0 alone.
        options: arguments of `CheckpointStore`, if ``store`` is none.

    Raises (all of them on every rank, inside of DCP's `CheckpointException`):
        StorageError: the store cannot be written.
        UnsupportedFormatError: the planner made something that is no tensor of a dtype that the
            format has, or metadata that is not JSON.
    """

    def __init__(
        self,
        store: CheckpointStore | str | os.PathLike[str] | None = None,
        *,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        base: bool = False,
        progress: ProgressArgument = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._place = _Place(store, step, options)
        self._progress = progress
        self._metrics = {str(name): float(value) for name, value in (metrics or {}).items()}
        self._tags = {str(name): str(value) for name, value in (tags or {}).items()}
        self._base = base
        self._part_of: str | None = None
        #: Without collectives: tags that say whose checkpoint it is.
        self._alone: dict[str, str] = {}
        #: What the store lists, on the coordinating rank, after a save.
        self.entry: CheckpointEntry | None = None

    @property
    def checkpoint_id(self) -> str:
        """Store and step, for messages."""
        return str(self._place)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._place.reset(checkpoint_id)
        self._part_of, self.entry = None, None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _is_id(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._alone = {}
        if not kwargs.get("use_collectives", True):
            self._alone = {_RANK: str(kwargs.get("rank", 0)), _RANKS: str(_world())}
        if self._place.step is None:
            raise ValueError(f"{self._place.store.url}: no step was given to save as")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        raw = sum(_nbytes(item) for plan in plans for item in plan.items)
        native = self._place.store._open("open_or_create")
        self._part_of = _core.begin_parts(native, raw, self._base)
        return [
            dataclasses.replace(plan, storage_data=_Share(self._part_of, rank))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        share: _Share = plan.storage_data
        store = self._place.store
        recorder = Recorder("save", store.url, self._place.step, share.rank)
        held: list[torch.Tensor] = []
        held_names: list[str] = []
        names: dict[tuple[Any, ...], str] = {}
        stored: list[tuple[WriteItem, str, int]] = []
        for item in plan.items:
            tensor = _values(item, planner)
            # Tied tensors are stored once.
            key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape)
            name = names.get(key) if tensor.numel() else None
            if name is None:
                name = names[key] = _name(item)
                held.append(tensor)
                held_names.append(name)
            stored.append((item, name, tensor.nbytes))
        part = None
        if stored:
            progress = self._progress if share.rank == 0 else None
            part = _save(store, share, held_names, held, recorder, progress)
        results = []
        for item, name, nbytes in stored:
            # The first item brings the part along.
            results.append(WriteResult(item.index, nbytes, _Stored(name, part)))
            part = None
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        store, step = self._place.store, self._place.step
        if self._part_of is None or step is None:
            raise RuntimeError("a save that was not begun cannot be finished")
        names = {result.index: result.storage_data.name for rank in results for result in rank}
        parts = [
            next((r.storage_data.part for r in rank if r.storage_data.part is not None), None)
            for rank in results
        ]
        native = store._open("open_or_create")
        try:
            text = to_json(metadata, names)
        except UnsupportedFormatError:
            _core.give_up_parts(native, self._part_of)
            raise
        done = _core.publish_parts(
            native,
            self._part_of,
            step,
            parts,
            blobs={_BLOB: text},
            metadata={},
            metrics=self._metrics,
            tags={**self._tags, **self._alone},
        )
        metadata.storage_data = names
        metadata.storage_meta = self.storage_meta()
        self._part_of = None
        self.entry = store._saved(json.loads(done))


class StorageReader(dcp.StorageReader):  # type: ignore[misc]
    """Reads distributed checkpoints from a `CheckpointStore`, with any number of ranks.

    Args:
        store: as in `StorageWriter`.
        step: the training step; ``None``: the newest checkpoint. A ``checkpoint_id`` that ends with
            digits takes its place. The ``id`` of an entry names one among several of a step.
        progress: as in `StorageWriter`.
        options: as in `StorageWriter`.

    Raises (inside of DCP's `CheckpointException`):
        NotFoundError: there is no such checkpoint, or it is not a distributed one.
        CorruptDataError: it, or one that it needs, is damaged.
    """

    def __init__(
        self,
        store: CheckpointStore | str | os.PathLike[str] | None = None,
        *,
        step: int | None = None,
        progress: ProgressArgument = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._place = _Place(store, step, options)
        self._progress = progress
        self._reader: _core.Reader | None = None
        self._metadata: Metadata | None = None
        self._step: int | None = None
        self._names: dict[MetadataIndex, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None, "_metadata": None, "_names": {}}

    @property
    def checkpoint_id(self) -> str:
        """Store and step, for messages."""
        return str(self._place)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._place.reset(checkpoint_id)
        self._reader, self._metadata, self._names = None, None, {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _is_id(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            store = self._place.store
            entry = self._entry(kwargs.get("rank"))
            reader = store._open("open").open(entry.id)
            where = f"{store.url}: step {entry.step}"
            try:
                text = reader.blob(_BLOB)
            except KeyError:
                what = f"{where} was not saved by torch.distributed.checkpoint: use load_checkpoint"
                raise NotFoundError(what) from None
            self._metadata, self._names = from_json(text, where)
            self._step = entry.step
            self._reader = reader
        return self._metadata

    def _entry(self, rank: int | None) -> CheckpointEntry:
        """The checkpoint of all ranks; or that of one, which saved without collectives.

        DCP asks again with a rank when the first call failed. If one rank were answered then with the
        checkpoint of all, it would go on alone, and all others would wait for it.
        """
        store, step = self._place.store, self._place.step
        if rank is None:
            entry = store._find(step)
            if _RANK in entry.tags:
                raise NotFoundError(f"{self._place}: each rank has a checkpoint of its own")
            return entry
        found = [e for e in store.list() if _RANK in e.tags and step in (None, e.step, e.id)]
        for entry in reversed(found):
            ranks = {e.tags[_RANK] for e in found if e.step == entry.step}
            whole = {str(n) for n in range(_world())} <= ranks
            if whole and (entry.tags[_RANK], entry.tags.get(_RANKS)) == (str(rank), str(_world())):
                return entry
        raise NotFoundError(f"{self._place}: no checkpoint that {_world()} ranks saved on their own")

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        self.read_metadata()
        assert self._reader is not None
        compute = self._place.store._compute()
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        recorder = Recorder("load", self._place.store.url, self._step, rank)
        stored = _StoredTensors(self._reader, self._names, compute, str(self._place))
        recorder.look(self._reader)
        with recorder.watch(), recorder.stage("read"):
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(stored.bytes_of(item)))
                else:
                    stored.fill(item, planner)
            stored.finish(planner, self._progress if rank == 0 else None)
            recorder.raw_bytes = stored.read_bytes
        done: Future[None] = Future()
        done.set_result(None)
        return done


def save(
    state_dict: dict[str, Any],
    store: CheckpointStore | str | os.PathLike[str],
    step: int,
    *,
    planner: dcp.SavePlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    **options: Any,
) -> CheckpointEntry | None:
    """`dcp.save` into a store, without a pickle where JSON will do.

    Args:
        state_dict: as there, and so for ``process_group`` and ``no_dist``.
        store: as in `StorageWriter`, and so for ``step`` and ``options``.
        planner: ``None``: a `SavePlanner`.

    Returns:
        What the store lists, on the coordinating rank; ``None`` on the others.
    """
    writer = StorageWriter(store, step=step, **options)
    dcp.save(
        state_dict,
        storage_writer=writer,
        planner=planner or SavePlanner(),
        process_group=process_group,
        no_dist=no_dist,
    )
    return writer.entry


def async_save(
    state_dict: dict[str, Any],
    store: CheckpointStore | str | os.PathLike[str],
    step: int,
    *,
    stager: Stager,
    planner: dcp.SavePlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    **options: Any,
) -> Any:
    """`dcp.async_save` into a store, on a thread, with a stager that is used for all saves.

    Args:
        state_dict: as in `save`, and so for the rest.
        stager: which copies.

    Returns:
        DCP's future.
    """
    return dcp.async_save(
        state_dict,
        storage_writer=StorageWriter(store, step=step, **options),
        planner=planner or SavePlanner(),
        process_group=process_group,
        async_stager=stager,
        no_dist=no_dist,
    )


def load(
    state_dict: dict[str, Any],
    store: CheckpointStore | str | os.PathLike[str],
    step: int | None = None,
    *,
    planner: dcp.LoadPlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    **options: Any,
) -> None:
    """`dcp.load` from a store, in place, with a planner that runs no code of the checkpoint.

    Args:
        state_dict: as there, and so for ``process_group`` and ``no_dist``.
        store: as in `StorageReader`, and so for ``step`` and ``options``.
        planner: ``None``: a `LoadPlanner`.
    """
    dcp.load(
        state_dict,
        storage_reader=StorageReader(store, step=step, **options),
        planner=planner or LoadPlanner(),
        process_group=process_group,
        no_dist=no_dist,
    )


class _StoredTensors:
    """Reads pieces of what is stored: whole tensors together, at the end, on all threads."""

    def __init__(
        self,
        reader: _core.Reader,
        names: Mapping[MetadataIndex, str],
        compute: Compute,
        where: str,
    ) -> None:
        self._reader, self._names, self._compute, self._where = reader, names, compute, where
        self._places = Places()
        #: Bytes of values that were asked for.
        self.read_bytes = 0
        self._tensors = {t[0]: (number, t[1], t[2]) for number, t in enumerate(reader.tensors())}
        self._whole: list[tuple[ReadItem, torch.Tensor, int, torch.Tensor]] = []

    def _find(self, index: MetadataIndex) -> tuple[int, str, tuple[int, ...]]:
        name = self._names.get(index)
        found = None if name is None else self._tensors.get(name)
        if found is None:
            raise CorruptDataError(f"{self._where}: {index} is not stored")
        return found

    def bytes_of(self, item: ReadItem) -> bytes:
        number, _, shape = self._find(item.storage_index)
        values = bytearray(shape[0])
        if values:
            memory = torch.frombuffer(values, dtype=torch.uint8)
            self._reader.read_into([(number, memory.data_ptr(), len(values))], None)
        return bytes(values)

    def fill(self, item: ReadItem, planner: dcp.LoadPlanner) -> None:
        number, kind, shape = self._find(item.storage_index)
        target = planner.resolve_tensor(item).detach()
        dtype = getattr(torch, kind)
        lengths = tuple(item.lengths)
        if tuple(target.shape) != lengths:
            what = f"{item.storage_index}: {lengths} values for {tuple(target.shape)}"
            raise ValueError(f"{self._where}: {what}")
        plain = target.is_contiguous() and not target.is_conj() and not target.is_neg()
        straight = plain and target.dtype == dtype
        if lengths == tuple(shape):
            # Into memory of the host, or of a device that decodes.
            values = target if straight and self._can_fill(target) else None
            values = torch.empty(lengths, dtype=dtype) if values is None else values
            self._whole.append((item, target, number, values))
            return
        straight = straight and target.device.type == "cpu"
        values = target if straight else torch.empty(lengths, dtype=dtype)
        if values.numel():
            starts = tuple(item.storage_offsets)
            part = [(a, a + n) for a, n in zip(starts, lengths, strict=True)]
            memory = (values.data_ptr(), values.nbytes)
            self.read_bytes += values.nbytes
            self._reader.read_view(number, (0, values.itemsize, tuple(shape)), part, memory)
        _commit(planner, item, target, values)

    def _can_fill(self, target: torch.Tensor) -> bool:
        if target.device.type == "cuda":
            return self._compute.engine({target.device.index}) is not None
        return bool(target.device.type == "cpu")

    def finish(self, planner: dcp.LoadPlanner, progress: ProgressArgument) -> None:
        """Reads what is wanted whole."""
        wanted = [
            (number, values.data_ptr(), values.nbytes, self._places.of(values.untyped_storage()))
            for _, _, number, values in self._whole
            if values.numel()
        ]
        total = sum(request[2] for request in wanted)
        self.read_bytes += total
        with contextlib.closing(Progress(progress, total, "load")) as tracker:
            read_batch(self._reader, self._compute, wanted, tracker)
            tracker.finish()
        for item, target, _, values in self._whole:
            _commit(planner, item, target, values)
        self._whole.clear()


def _commit(
    planner: dcp.LoadPlanner, item: ReadItem, target: torch.Tensor, values: torch.Tensor
) -> None:
    if values is not target:
        target.copy_(values)
    planner.commit_tensor(item, target)


def _is_id(checkpoint_id: str | os.PathLike[str]) -> bool:
    try:
        text = os.fspath(checkpoint_id)
    except TypeError:
        return False
    return _STEP.match(text.rstrip("/")) is not None and ("://" not in text or is_url(text))


def _world() -> int:
    return int(dist.get_world_size()) if dist.is_available() and dist.is_initialized() else 1


def _nbytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return int(item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize)


def _name(item: WriteItem) -> str:
    """The name of a stored tensor: that of the whole one, or with the place of the shard in it."""
    data, index = item.tensor_data, item.index
    if data is None or data.chunk.sizes == data.size or index.offset is None:
        return str(index.fqn)
    return f"{index.fqn}@{','.join(map(str, index.offset))}"


def _values(item: WriteItem, planner: dcp.SavePlanner) -> torch.Tensor:
    """The values of an item, contiguous."""
    data = planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        raw = data.getvalue()
        if not raw:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    tensor: torch.Tensor = data.detach()
    for copies in device_copies([tensor]):
        copies.wait()
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise UnsupportedFormatError(f"{item.index.fqn!r}: a tensor with strides expected")
    if dtype_name(tensor.dtype) == "bytes":
        raise UnsupportedFormatError(f"{item.index.fqn!r}: the format has no {tensor.dtype}")
    return tensor.resolve_conj().resolve_neg().contiguous()


def _save(
    store: CheckpointStore,
    share: _Share,
    names: list[str],
    tensors: list[torch.Tensor],
    recorder: Recorder,
    progress: ProgressArgument,
) -> bytes:
    """Stores a rank's tensors; gives what the coordinator needs."""
    compute = store._compute()
    devices = {t.device.index for t in tensors if t.device.type == "cuda" and t.numel()}
    engine = compute.engine(devices) if devices else None
    places = Places()
    recorder.raw_bytes = sum(tensor.nbytes for tensor in tensors)
    tracker = Progress(progress, recorder.raw_bytes, "save")
    held, sources = [], []
    for name, tensor in zip(names, tensors, strict=True):
        where = HOST
        if engine is not None and tensor.device.type == "cuda" and tensor.numel():
            where = places.of(tensor.untyped_storage())
        elif tensor.device.type != "cpu":
            tensor = tensor.cpu()
        held.append(tensor)
        address = tensor.data_ptr() if tensor.numel() else 0
        shape = tuple(tensor.shape)
        sources.append((name, dtype_name(tensor.dtype), shape, address, tensor.nbytes, where))
    groups = [_OPTIMIZER if name.startswith("optim") else _WEIGHTS for name in names]
    copies = device_copies(held)

    def free() -> None:
        for each in copies:
            each.free()

    native = store._open("open_or_create")
    with contextlib.closing(tracker), recorder.watch(), recorder.stage("encode"):
        part, _, recorder.stored_bytes = _core.save_part(
            native,
            share.part_of,
            share.rank,
            sources,
            groups=bytes(groups),
            callback=tracker.native(),
            engine=engine,
            staged=free if copies and engine is not None else None,
            host_changes=False,
            staging_memory=None,
        )
        tracker.finish()
    return part
