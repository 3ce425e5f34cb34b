"""Reading what a rank asks for of a distributed checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem

from . import _core
from ._device import Compute, Places
from ._errors import CorruptDataError
from ._progress import Progress, ProgressArgument
from ._storages import read_batch


class StoredTensors:
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
