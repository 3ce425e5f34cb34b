"""Storage for `torch.distributed.checkpoint` (DCP): distributed checkpoints in a `CheckpointStore`.

Each rank compresses its own shards on its own device into its own objects. Once all of them are
stored, one entry in the store's log lists the checkpoint. Consecutive checkpoints with the same
sharding are stored as deltas::

    import torch.distributed.checkpoint as dcp
    import s4weights.dcp

    dcp.save(state, storage_writer=s4weights.dcp.StorageWriter("s3://bucket/run", step=1000))
    reader = s4weights.dcp.StorageReader("s3://bucket/run", step=1000)
    dcp.load(state, storage_reader=reader, planner=s4weights.dcp.LoadPlanner())

The result is a normal checkpoint: retention, `verify` and the command line work with it, and any
number of ranks, with any sharding, can load it. Only the chunks that a rank needs are decoded.
Metadata is stored as JSON. Values that are not tensors are stored as encoded by DCP's planner,
which pickles them: `LoadPlanner` loads these without running code, and `SavePlanner` writes most of
them as JSON instead.

`save`, `async_save` and `load` are DCP's functions with all of this preconfigured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import threading
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    SavePlan,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from . import _core
from ._dcp_metadata import from_json, to_json
from ._dcp_place import Place, is_id
from ._dcp_planners import LoadPlanner, SavePlanner
from ._dcp_read import StoredTensors
from ._dcp_stager import Stager, device_copies
from ._dcp_together import exchanges, or_no_load, or_no_save, sends_errors
from ._dcp_wrapped import MARK, unwrap
from ._device import HOST, Places
from ._entries import CheckpointEntry, checked_step, labels_of
from ._errors import ConflictError, NotFoundError, UnsupportedFormatError
from ._pending import Outside, saving_here
from ._progress import Progress, ProgressArgument
from ._report import Recorder
from ._sources import check_flag
from ._storages import dtype_name, is_strided, require_storage
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

#: Tags of a checkpoint that one rank saved without the others: its rank, and the number of ranks.
_RANK, _RANKS = "dcp.rank", "dcp.ranks"

#: The groups of tensors that the store keeps in separate objects.
_WEIGHTS, _OPTIMIZER = 0, 1


#: The number of items in each rank's plan, for later saves: a planner that caches plans sends
#: unchanged plans without their items.
_items_of: dict[int, int] = {}


class _Share(NamedTuple):
    """The coordinator's message to a rank before the rank writes."""

    part_of: str
    rank: int

    def __reduce__(self) -> Any:
        return _received, (self.part_of, self.rank)


#: The share that this thread received last. It has precedence over the one in the plan: a planner
#: that caches plans passes the first save's share to all later saves.
_of_thread = threading.local()


def _received(part_of: str, rank: int) -> _Share:
    _of_thread.share = share = _Share(part_of, rank)
    return share


class _Stored(NamedTuple):
    """The name under which a rank stored an item and, with its first item, the rank's part, which
    the coordinator needs.
    """

    name: str
    part: bytes | None


class _Found(NamedTuple):
    """The checkpoint that a rank is about to load. Without an id it is the rank's own one."""

    step: int
    id: str | None

    def __str__(self) -> str:
        return f"step {self.step}" + ("" if self.id is None else f" ({self.id})")


class StorageWriter(dcp.StorageWriter):  # type: ignore[misc]
    """Writes distributed checkpoints to a `CheckpointStore`.

    Every rank creates one, with the same arguments. It can be pickled, and can be reused for
    consecutive saves; a background save in this process needs its own writer.

    Args:
        store: a `CheckpointStore`, its folder or its URL. ``None`` if each ``checkpoint_id``
            contains it, as in ``"s3://bucket/run/step-1000"``.
        step: the training step. A ``checkpoint_id`` that ends with digits overrides it.
        metrics: as in `CheckpointStore.save_checkpoint`. Only the ``metrics``, ``tags`` and
            ``base`` of the coordinating rank are used.
        tags: as in `CheckpointStore.save_checkpoint`.
        base: store a base instead of a delta.
        overwrite: if ``False``, raise an error if the store already lists the step. Otherwise both
            checkpoints are listed, and loading that step loads the newer one.
        progress: as in `save`. Only called on rank 0, for the data that rank 0 stores.
        options: arguments of `CheckpointStore`, if ``store`` is not one.

    Raises (all of them on every rank, inside DCP's `CheckpointException`):
        StorageError: the store cannot be written.
        ConflictError: the step is already listed, and ``overwrite`` is false.
        UnsupportedFormatError: the planner produced a tensor with a dtype that the format does not
            support, a value that is not a plain tensor, or metadata that cannot be stored as JSON.
    """

    def __init__(
        self,
        store: CheckpointStore | str | os.PathLike[str] | None = None,
        *,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        base: bool = False,
        overwrite: bool = True,
        progress: ProgressArgument = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._place = Place(store, None if step is None else checked_step(step), options)
        for name, flag in (("base", base), ("overwrite", overwrite)):
            check_flag(name, flag)
        self._overwrite = overwrite
        self._progress = progress
        self._metrics, self._tags = labels_of(metrics, tags)
        self._base = base
        self._part_of: str | None = None
        self._rank = 0
        #: Without collectives: tags that say which rank's checkpoint it is.
        self._alone: dict[str, str] = {}
        #: The store's entry after a save; set on the coordinating rank only.
        self.entry: CheckpointEntry | None = None

    @property
    def checkpoint_id(self) -> str:
        """Store and step, in the form that DCP's functions take."""
        return self._place.id

    @property
    def save_id(self) -> str | None:
        """The id of the saved checkpoint. ``None`` before the save, and on ranks other than the coordinating one."""
        return None if self.entry is None else self.entry.id

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._place.reset(checkpoint_id)
        self._part_of, self.entry = None, None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_id(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        self._place.exchanging = True
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._alone = {}
        self._rank = int(kwargs.get("rank", 0))
        _of_thread.share = None
        if not kwargs.get("use_collectives", True):
            self._alone = {_RANK: str(kwargs.get("rank", 0)), _RANKS: str(_world())}
        if self._place.step is None:
            raise ValueError(f"{self._place.store.url}: no step was given for the save")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @sends_errors
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        raw = sum(_nbytes(item) for plan in plans for item in plan.items)
        native = self._place.store._open("open_or_create")
        if not self._overwrite:
            self._require_new()
        for rank, plan in enumerate(plans):
            if getattr(plan, "usable", True):
                _items_of[rank] = len(plan.items)
        items = [max(_items_of.get(rank, 1), 1) for rank in range(len(plans))]
        parts = _core.begin_parts(native, raw, items, self._base)
        shares = [_Share(part_of, rank) for rank, part_of in enumerate(parts)]
        # Any rank's will do to list the checkpoint.
        self._part_of = parts[0]
        # Without collectives there is only this rank's plan, whichever rank it is.
        _of_thread.share = shares[self._rank if len(plans) > 1 else 0]
        pairs = zip(plans, shares, strict=True)
        return [dataclasses.replace(plan, storage_data=share) for plan, share in pairs]

    def _require_new(self) -> None:
        place, rank = self._place, self._alone.get(_RANK)
        for entry in place.store.list():
            if entry.step == place.step and entry.tags.get(_RANK) == rank:
                what = f"Checkpoint already exists: {place} is {entry.id}, and overwrite=False"
                raise ConflictError(what)

    @sends_errors
    def write_data(self, plan: SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        share: _Share = _of_thread.share or plan.storage_data
        store = self._place.store
        store._deadline.check()
        recorder = Recorder("save", store.url, self._place.step, share.rank)
        held: list[torch.Tensor] = []
        held_names: list[str] = []
        names: dict[tuple[Any, ...], str] = {}
        stored: list[tuple[WriteItem, str, int]] = []
        for item in plan.items:
            pieces = _values(item, planner)
            # Tied tensors are stored once.
            key = tuple((t.device, t.data_ptr(), t.dtype, t.shape) for t in pieces.values())
            name = names.get(key) if any(t.numel() for t in pieces.values()) else None
            if name is None:
                name = names[key] = _name(item)
                held += pieces.values()
                held_names += [name + suffix for suffix in pieces]
            stored.append((item, name, sum(t.nbytes for t in pieces.values())))
        part = None
        if stored:
            progress = self._progress if share.rank == 0 else None
            part = _save(store, share, held_names, held, recorder, progress)
        results = []
        for item, name, nbytes in stored:
            # The first item carries the part.
            results.append(WriteResult(item.index, nbytes, _Stored(name, part)))
            part = None
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    @sends_errors
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        store, step = self._place.store, self._place.step
        if self._part_of is None or step is None:
            raise RuntimeError("cannot finish a save that was not started")
        names = {result.index: result.storage_data.name for rank in results for result in rank}
        parts = [
            next((r.storage_data.part for r in rank if r.storage_data.part is not None), None)
            for rank in results
        ]
        native = store._open("open_or_create")
        try:
            store._deadline.check()
            text = to_json(metadata, names)
        except Exception:
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
        self._part_of = None
        self.entry = store._saved(json.loads(done))
        metadata.storage_data = names
        metadata.storage_meta = StorageMeta(self.checkpoint_id, save_id=self.save_id)


class StorageReader(dcp.StorageReader):  # type: ignore[misc]
    """Reads distributed checkpoints from a `CheckpointStore`, with any number of ranks.

    Args:
        store: as in `StorageWriter`.
        step: the training step. ``None`` means the newest checkpoint. A ``checkpoint_id`` that ends with
            digits overrides it. The ``id`` of an entry selects one of several checkpoints of the
            same step.
        progress: as in `StorageWriter`.
        options: as in `StorageWriter`.

    Raises (inside DCP's `CheckpointException`):
        NotFoundError: the checkpoint does not exist, or is not a distributed checkpoint.
        ConflictError: a checkpoint was listed in the meantime, so that some ranks found it and
            others found the previous one. Nothing was loaded.
        CorruptDataError: the checkpoint, or another one that it needs, is damaged.
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
        self._place = Place(store, step, options)
        self._progress = progress
        self._reader: _core.Reader | None = None
        self._metadata: Metadata | None = None
        self._step: int | None = None
        self._entry_id: str | None = None
        self._found: _Found | None = None
        self._names: dict[MetadataIndex, str] = {}
        #: The id, in DCP's metadata, of loads through this reader until it is reset.
        self.load_id = str(uuid.uuid4())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None, "_metadata": None, "_names": {}}

    @property
    def checkpoint_id(self) -> str:
        """Store and step, in the form that DCP's functions take."""
        return self._place.id

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._place.reset(checkpoint_id)
        self._reader, self._metadata, self._names = None, None, {}
        self.load_id = str(uuid.uuid4())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_id(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._place.exchanging = True
        store = self._place.store
        # Reading again without naming a checkpoint means the newest one at that time.
        entry = self._entry(kwargs.get("rank"))
        if self._metadata is None or entry.id != self._entry_id:
            reader = store._open("open").open(entry.id)
            where = f"{store.url}: step {entry.step}"
            try:
                text = reader.blob(_BLOB)
            except KeyError:
                what = f"{where} was not saved with torch.distributed.checkpoint: use load_checkpoint"
                raise NotFoundError(what) from None
            self._metadata, self._names = from_json(text, where)
            ids = {"save_id": entry.id, "load_id": self.load_id}
            self._metadata.storage_meta = StorageMeta(self.checkpoint_id, **ids)
            self._step, self._entry_id = entry.step, entry.id
            self._found = _Found(entry.step, None if _RANK in entry.tags else entry.id)
            self._reader = reader
        return self._metadata

    def _entry(self, rank: int | None) -> CheckpointEntry:
        """The checkpoint of all ranks or, given a rank, the one that it saved without collectives.

        DCP asks again with a rank when the first call failed. If a rank then got the checkpoint of
        all ranks, it would go on alone while all others wait for it.
        """
        store, step = self._place.store, self._place.step
        if rank is None:
            entry = store._find(step)
            if _RANK in entry.tags:
                raise NotFoundError(f"{self._place}: each rank saved its own checkpoint")
            return entry
        found = [e for e in store.list() if _RANK in e.tags and step in (None, e.step, e.id)]
        for entry in reversed(found):
            ranks = {e.tags[_RANK] for e in found if e.step == entry.step}
            whole = {str(n) for n in range(_world())} <= ranks
            if whole and (entry.tags[_RANK], entry.tags.get(_RANKS)) == (str(rank), str(_world())):
                return entry
        raise NotFoundError(
            f"{self._place}: no checkpoint that {_world()} ranks each saved on their own"
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._loaded()

    def _loaded(self) -> _core.Reader:
        """The checkpoint whose metadata was read."""
        if self._reader is None:
            self.read_metadata()
        assert self._reader is not None
        return self._reader

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=self._found)

    @sends_errors
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        # Each rank looks for the checkpoint on its own. A planner may make plans without ours.
        ranks: dict[_Found, int] = {}
        for rank, plan in enumerate(plans):
            if isinstance(plan.storage_data, _Found):
                ranks.setdefault(plan.storage_data, rank)
        if len(ranks) > 1:
            found = ", ".join(f"rank {rank} {entry}" for entry, rank in ranks.items())
            what = "ranks found different checkpoints, because one was listed in the meantime"
            hint = "load again, or pass the step" if self._place.step is None else "load again"
            raise ConflictError(f"{self._place}: {what}: {found}: {hint}")
        return plans

    @sends_errors
    def read_data(self, plan: LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        reader = self._loaded()
        compute = self._place.store._compute()
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        recorder = Recorder("load", self._place.store.url, self._step, rank)
        stored = StoredTensors(reader, self._names, compute, str(self._place))
        recorder.look(reader)
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
    """Save a state dict to a store with `dcp.save`, with JSON instead of pickles where possible.

    Args:
        state_dict: as in `dcp.save`, as are ``process_group`` and ``no_dist``.
        store: as in `StorageWriter`, as are ``step`` and ``options``.
        planner: the planner. ``None`` means a `SavePlanner`.

    Returns:
        The store's entry on the coordinating rank, or ``None`` on the others.
    """
    with or_no_save(process_group, no_dist):
        writer = StorageWriter(store, step=step, **options)
    # DCP calls `state_dict` of each `Stateful` before it exchanges anything.
    refusing = or_no_save(process_group, no_dist, lambda: writer._place.exchanging)
    with refusing, saving_here(writer._place.store):
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
    """Save a state dict to a store with `dcp.async_save`, on a thread, with one stager for all saves.

    Args:
        state_dict: as in `save`, as are the other arguments.
        stager: the stager that copies the state.

    Returns:
        A future for the return value of `dcp.save`. Closing the store waits for it, and raises its
        error unless the error has already been retrieved.
    """
    with or_no_save(process_group, no_dist):
        writer = StorageWriter(store, step=step, **options)
    pending = Outside(f"{writer._place}: the save", writer._place.store._outside)
    with saving_here(writer._place.store):
        # DCP stages before it exchanges anything, on a thread.
        with or_no_save(process_group, no_dist):
            future = dcp.async_save(
                state_dict,
                storage_writer=writer,
                planner=planner or SavePlanner(),
                process_group=process_group,
                async_stager=stager,
                no_dist=no_dist,
            )
        pending.follow(future)
        if not no_dist:
            exchanges(future)
    return pending.committed


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
    """Load a state dict from a store in place, with `dcp.load`. The default planner runs no code from it.

    Args:
        state_dict: as in `dcp.load`, as are ``process_group`` and ``no_dist``.
        store: as in `StorageReader`, as are ``step`` and ``options``.
        planner: the planner. ``None`` means a `LoadPlanner`.
    """
    agree = step is None and not no_dist and _world() > 1
    with or_no_load(process_group, no_dist, lambda: agree and _newest(None, process_group)):
        reader = StorageReader(store, step=step, **options)
    if agree:
        reader._place.step = _newest(reader, process_group)
    # DCP calls `state_dict` of each `Stateful` before it exchanges anything.
    has_keys = isinstance(state_dict, dict)
    with or_no_load(process_group, no_dist, begun=lambda: reader._place.exchanging, has_keys=has_keys):
        dcp.load(
            state_dict,
            storage_reader=reader,
            planner=planner or LoadPlanner(),
            process_group=process_group,
            no_dist=no_dist,
        )


def _newest(reader: StorageReader | None, group: Any) -> Any:
    """The checkpoint that is the newest for the group's first rank: all ranks load that one, even
    if another is listed meanwhile. ``None`` if it found none: then each rank's load says why.
    Without a reader, a rank only hears what the first one found.
    """
    found: list[Any] = [None]
    if reader is not None and dist.get_rank(group) == 0:
        try:
            found = [reader._entry(None).id]
        except NotFoundError:
            # Each rank may have its own checkpoints.
            with contextlib.suppress(Exception):
                found = [reader._entry(0).step]
        except Exception:  # The others wait for an answer. With `None`, each rank looks on its own.
            pass
    first = 0 if group is None else dist.get_global_rank(group, 0)
    dist.broadcast_object_list(found, src=first, group=group)
    return found[0]


def _world() -> int:
    return int(dist.get_world_size()) if dist.is_available() and dist.is_initialized() else 1


def _nbytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return int(item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize)


def _name(item: WriteItem) -> str:
    """The name of a stored tensor: that of the whole tensor, for a shard followed by its offset."""
    data, index = item.tensor_data, item.index
    # Escaped, so that no shard has the name of another tensor. No name is empty.
    name = str(index.fqn).replace("~", "~0").replace("@", "~1") or "~"
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedFormatError(f"{index.fqn!r}: the name cannot be encoded as UTF-8") from error
    if data is None or data.chunk.sizes == data.size or index.offset is None:
        return name
    return f"{name}@{','.join(map(str, index.offset))}"


def _values(item: WriteItem, planner: dcp.SavePlanner) -> dict[str, torch.Tensor]:
    """The values of an item, contiguous, by name suffix: a wrapper has those of several tensors."""
    data = planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        return {"": _bytes(data.getvalue())}
    where = repr(item.index.fqn)
    wrapped = unwrap(data, where)
    if wrapped is None:
        return {"": _plain(data, where)}
    pieces = {MARK: _bytes(wrapped.to_json())}
    for path, tensor in wrapped.tensors.items():
        pieces[MARK + path] = _plain(tensor, f"{where}: {path}")
    return pieces


def _bytes(raw: bytes) -> torch.Tensor:
    if not raw:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _plain(data: torch.Tensor, where: str) -> torch.Tensor:
    """A tensor that wraps no others, in the form in which it is stored."""
    tensor = data.detach()
    for copies in device_copies([tensor]):
        copies.wait()
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise UnsupportedFormatError(f"{where}: expected a strided tensor")
    if dtype_name(tensor.dtype) == "bytes":
        raise UnsupportedFormatError(f"{where}: the format does not support {tensor.dtype}")
    if tensor.is_meta or is_strided(tensor):
        if tensor.untyped_storage().device.type == "meta":
            raise UnsupportedFormatError(f"{where}: a tensor without values, such as one on `meta`")
        require_storage(tensor, where)
    return tensor.resolve_conj().resolve_neg().contiguous()


def _save(
    store: CheckpointStore,
    share: _Share,
    names: list[str],
    tensors: list[torch.Tensor],
    recorder: Recorder,
    progress: ProgressArgument,
) -> bytes:
    """Store a rank's tensors; return the rank's part, which the coordinator needs."""
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
            callback=store._watch(tracker),
            engine=engine,
            staged=free if copies and engine is not None else None,
            host_changes=False,
            staging_memory=None,
        )
        tracker.finish()
    return part
