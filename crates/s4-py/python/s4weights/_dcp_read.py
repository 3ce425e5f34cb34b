"""Reads the parts of a distributed checkpoint that a rank asks for."""

from __future__ import annotations

import contextlib
import json
import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import _core
from ._dcp_wrapped import MARK, Wrapped, unwrap
from ._device import Compute, Places
from ._errors import CorruptDataError, MismatchError
from ._progress import Progress, ProgressArgument
from ._storages import has_storage, is_strided, read_batch

#: Device memory for whole tensors of which only parts are wanted: a fraction of the free memory
#: (the denominator), and the most bytes.
_FREE_SHARE, _AT_ONCE = 4, 1 << 30
#: A part for a device is cut out there if it spans this fraction (the denominator) of the tensor.
_SPANS = 4


#: The most characters of a wrapper's description in messages.
_SHOWN = 200


class _Part(NamedTuple):
    """A part of a stored tensor, for a target on a device that decodes the whole stored tensor."""

    item: ReadItem
    target: torch.Tensor
    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(math.prod(self.shape) * self.dtype.itemsize)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        starts = zip(self.item.storage_offsets, self.item.lengths, strict=True)
        return whole[tuple(slice(start, start + length) for start, length in starts)]


class StoredTensors:
    """Reads stored tensors and parts of them. Whole tensors, and parts for devices, are read
    together at the end, on all threads.
    """

    def __init__(
        self,
        reader: _core.Reader,
        names: Mapping[MetadataIndex, str],
        compute: Compute,
        where: str,
    ) -> None:
        self._reader, self._names, self._compute, self._where = reader, names, compute, where
        self._places = Places()
        #: Bytes of the values that were asked for.
        self.read_bytes = 0
        self._tensors = {t[0]: (number, t[1], t[2]) for number, t in enumerate(reader.tensors())}
        #: Tensors that are read whole: the item (``None`` for part of a wrapper), the target, the
        #: index of the stored tensor, and the memory to read into.
        self._whole: list[tuple[ReadItem | None, torch.Tensor, int, torch.Tensor]] = []
        self._wrapped: list[tuple[ReadItem, torch.Tensor]] = []
        self._parts: list[_Part] = []

    def _find(self, index: MetadataIndex, suffix: str = "") -> tuple[int, str, tuple[int, ...]]:
        name = self._names.get(index)
        found = None if name is None else self._tensors.get(name + suffix)
        if found is None:
            what = f"{index}{suffix and ', ' + suffix.removeprefix(MARK)}"
            raise CorruptDataError(f"{self._where}: {what} is not stored")
        return found

    def bytes_of(self, item: ReadItem, suffix: str = "") -> bytes:
        number, kind, shape = self._find(item.storage_index, suffix)
        if kind != "uint8" or len(shape) != 1:
            raise CorruptDataError(f"{self._where}: {item.storage_index} is stored as a tensor")
        values = bytearray(shape[0])
        if values:
            memory = torch.frombuffer(values, dtype=torch.uint8)
            self._reader.read_into([(number, memory.data_ptr(), len(values))], None)
        return bytes(values)

    def fill(self, item: ReadItem, planner: dcp.LoadPlanner) -> None:
        target = planner.resolve_tensor(item).detach()
        name = self._names.get(item.storage_index)
        if name is not None and name not in self._tensors and name + MARK in self._tensors:
            self._fill_wrapped(item, target)
            return
        number, kind, shape = self._find(item.storage_index)
        dtype = getattr(torch, kind)
        lengths = tuple(item.lengths)
        if tuple(target.shape) != lengths:
            given = tuple(target.shape)
            what = f"{item.storage_index}: cannot load values of shape {lengths} into shape {given}"
            raise ValueError(f"{self._where}: {what}")
        _require_memory(target, f"{self._where}: {item.dest_index.fqn!r}")
        ends = map(operator.add, item.storage_offsets, lengths)
        if len(lengths) != len(shape) or any(map(operator.gt, ends, shape)):
            what = f"{item.storage_index}: {tuple(item.storage_offsets)}, {lengths} of {shape}"
            raise CorruptDataError(f"{self._where}: the stored tensor ends before {what}")
        if lengths == tuple(shape):
            self._fill_whole(item, target, number, dtype)
            return
        part = _Part(item, target, number, dtype, tuple(shape))
        if target.device.type == "cuda" and self._can_fill(target) and _spans_much(part):
            self._parts.append(part)
        else:
            self._fill_part(part, planner, _takes(target, dtype) and target.device.type == "cpu")

    def _fill_whole(
        self, item: ReadItem | None, target: torch.Tensor, number: int, dtype: torch.dtype
    ) -> None:
        """Request a whole stored tensor: read straight into the target if possible, else through host memory."""
        straight = _takes(target, dtype) and self._can_fill(target)
        values = target if straight else torch.empty(target.shape, dtype=dtype, device="cpu")
        self._whole.append((item, target, number, values))

    def _fill_wrapped(self, item: ReadItem, target: torch.Tensor) -> None:
        """Request the tensors that a wrapper wraps, for a target like it."""
        what = f"{self._where}: {item.storage_index.fqn!r}"
        try:
            saved = json.loads(self.bytes_of(item, MARK))
            kind, shape = _short(saved["class"]), tuple(saved["shape"])
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise CorruptDataError(f"{what}: invalid description of a wrapper: {error!r}") from error
        if any(item.storage_offsets) or tuple(item.lengths) != shape:
            raise ValueError(f"{what} is a {kind}: its shards must be loaded as they were saved")
        wrapped = unwrap(target, what)
        if wrapped is None or wrapped.description != saved:
            given = type(target).__name__ if wrapped is None else f"one with {_differences(saved, wrapped)}"
            raise ValueError(f"{what} was saved as a {kind}, but is being loaded into {given}")
        for path, part in wrapped.tensors.items():
            number, name, stored = self._find(item.storage_index, MARK + path)
            dtype = getattr(torch, name)
            if (part.dtype, tuple(part.shape)) != (dtype, tuple(stored)):
                given = f"{part.dtype} of {tuple(part.shape)}"
                raise ValueError(
                    f"{what}: {path} is {dtype} of {stored}, but is being loaded into {given}"
                )
            _require_memory(part, f"{what}: {path}")
            self._fill_whole(None, part.detach(), number, dtype)
        self._wrapped.append((item, target))

    def _fill_part(self, part: _Part, planner: dcp.LoadPlanner, straight: bool) -> None:
        """Decode the chunks that contain a part. ``straight``: directly into the target."""
        item, target, number, dtype, shape = part
        lengths = tuple(item.lengths)
        values = target if straight else torch.empty(lengths, dtype=dtype, device="cpu")
        if values.numel():
            starts = zip(item.storage_offsets, item.lengths, strict=True)
            ranges = [(start, start + length) for start, length in starts]
            memory = (values.data_ptr(), values.nbytes)
            self.read_bytes += values.nbytes
            self._reader.read_view(number, (0, values.itemsize, shape), ranges, memory)
        _commit(planner, item, target, values)

    def _can_fill(self, target: torch.Tensor) -> bool:
        if target.device.type == "cuda":
            return self._compute.engine({target.device.index}) is not None
        return bool(target.device.type == "cpu")

    def finish(self, planner: dcp.LoadPlanner, progress: ProgressArgument) -> None:
        """Read whole tensors, and the parts that devices cut out."""
        filled_by_another = self._separate_targets()
        wanted = [
            (number, values.data_ptr(), values.nbytes, self._places.of(values.untyped_storage()))
            for i, (_, _, number, values) in enumerate(self._whole)
            if values.numel() and i not in filled_by_another
        ]
        total = sum(request[2] for request in wanted)
        self.read_bytes += total
        total += sum(part.nbytes for part in self._parts)
        with contextlib.closing(Progress(progress, total, "load")) as tracker:
            read_batch(self._reader, self._compute, wanted, tracker)
            for parts in _batches(self._parts):
                self._cut(parts, planner, tracker)
            self._parts.clear()
            tracker.finish()
        for item, target, _, values in self._whole:
            _commit(planner, item, target, values)
        for item, target in self._wrapped:
            planner.commit_tensor(item, target)
        self._whole.clear()
        self._wrapped.clear()

    def _separate_targets(self) -> set[int]:
        """Make sure that no two requests fill the same memory, as those for tied weights would. Return the
        indices of targets that another target's request fills. Other targets that share memory are
        filled in order, through host memory, so that the last one wins.
        """
        extents = [
            (str(target.device), *_extent(target), i)
            for i, (_, target, _, _) in enumerate(self._whole)
            if target.numel() and not is_traceable_wrapper_subclass(target)
        ]
        groups: list[list[int]] = []
        where, last = "", 0
        for device, start, end, i in sorted(extents):
            if device != where or start >= last:
                groups.append([])
                where, last = device, start
            groups[-1].append(i)
            last = max(last, end)
        filled_by_another: set[int] = set()
        for group in (sorted(group) for group in groups if len(group) > 1):
            some = [self._whole[i] for i in group]
            straight = all(values is target for _, target, _, values in some)
            same = {(number, target.data_ptr(), target.nbytes) for _, target, number, _ in some}
            if straight and len(same) == 1:
                filled_by_another.update(group[1:])
                continue
            for i in group:
                item, target, number, values = self._whole[i]
                if values is target:
                    apart = torch.empty(values.shape, dtype=values.dtype, device="cpu")
                    self._whole[i] = (item, target, number, apart)
        return filled_by_another

    def _cut(self, parts: list[_Part], planner: dcp.LoadPlanner, tracker: Progress) -> None:
        """Decode whole stored tensors into free device memory, and copy the parts from there."""
        wholes: dict[int, torch.Tensor] = {}
        try:
            for part in parts:
                if part.number not in wholes:
                    device = part.target.device
                    wholes[part.number] = torch.empty(part.shape, dtype=part.dtype, device=device)
        except torch.OutOfMemoryError:
            wholes.clear()
            for part in parts:
                self._fill_part(part, planner, straight=False)
                tracker.advance(part.nbytes)
            return
        wanted = [
            (number, whole.data_ptr(), whole.nbytes, self._places.of(whole.untyped_storage()))
            for number, whole in wholes.items()
        ]
        read_batch(self._reader, self._compute, wanted, tracker)
        for part in parts:
            self.read_bytes += part.target.nbytes
            _commit(planner, part.item, part.target, part.of(wholes[part.number]))


def _spans_much(part: _Part) -> bool:
    """Whether a part needs many of its tensor's chunks."""
    if 0 in part.shape or 0 in part.item.lengths:
        return False
    span, step = 1, 1
    for size, length in zip(reversed(part.shape), reversed(tuple(part.item.lengths)), strict=True):
        span += (length - 1) * step
        step *= size
    return span * _SPANS >= step


def _batches(parts: list[_Part]) -> Iterator[list[_Part]]:
    """Group parts for one device whose tensors are decoded together."""
    batch: list[_Part] = []
    room = 0
    for part in sorted(parts, key=lambda part: (part.target.device.index, part.number)):
        again = bool(batch) and batch[-1].number == part.number
        if batch and (
            batch[-1].target.device != part.target.device or (not again and part.nbytes > room)
        ):
            yield batch
            batch, again = [], False
        if not batch:
            free, _ = torch.cuda.mem_get_info(part.target.device)
            room = min(free // _FREE_SHARE, _AT_ONCE)
        batch.append(part)
        if not again:
            room -= part.nbytes
    if batch:
        yield batch


def _takes(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether values of a dtype can be written to a tensor's memory directly, in order."""
    if target.dtype != dtype or is_traceable_wrapper_subclass(target):
        return False
    return target.is_contiguous() and not target.is_conj() and not target.is_neg()


def _require_memory(target: torch.Tensor, what: str) -> None:
    """Raise for a target whose memory was freed: values must not be written to what follows it."""
    if is_traceable_wrapper_subclass(target) or not is_strided(target) or has_storage(target):
        return
    nbytes = target.untyped_storage().nbytes()
    raise MismatchError(
        f"{what} cannot be filled: a tensor of shape {list(target.shape)} whose storage has only "
        f"{nbytes} bytes; was it freed?"
    )


def _extent(target: torch.Tensor) -> tuple[int, int]:
    """The address of a tensor's first byte, and the end of its last."""
    steps = zip(target.shape, target.stride(), strict=True)
    last = sum((size - 1) * step for size, step in steps)
    start = target.data_ptr()
    return start, start + (last + 1) * target.itemsize


def _differences(saved: Any, given: Wrapped) -> str:
    """The differences between a wrapper and the saved one."""
    differs = [key for key, value in given.description.items() if value != saved.get(key)]
    return ", ".join(
        f"{key} {_short(given.description[key])} instead of {_short(saved.get(key))}"
        for key in differs
    )


def _short(value: Any) -> str:
    """A value as text for messages, shortened: a checkpoint may hold text of any length."""
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _commit(
    planner: dcp.LoadPlanner, item: ReadItem | None, target: torch.Tensor, values: torch.Tensor
) -> None:
    if values is not target:
        target.copy_(values)
    elif not target.is_inference():
        # It was filled behind PyTorch's back: a backward pass must not take it for what it was.
        torch.autograd.graph.increment_version(target)
    if item is not None:
        planner.commit_tensor(item, target)
