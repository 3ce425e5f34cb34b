"""Puts distributed checkpoints together from their pieces, for the command line."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from . import _core
from ._dcp_folder import ChunkStorageMetadata, _finished, _Node, _pieces
from ._dcp_metadata import from_json, planner_paths
from ._dcp_planners import _from_json, _from_pickle, _is_json
from ._dcp_wrapped import MARK
from ._errors import CorruptDataError, UnsafeLoadError, UnsupportedFormatError
from ._storages import dtype_name

#: The blob that says how the pieces fit together.
BLOB = "dcp"


def put_together(reader: _core.Reader, where: str) -> dict[str, Any]:
    """The nested state dict of a distributed checkpoint, each tensor in one piece, as
    `dcp_to_torch_save` makes it from a folder. No pickled code runs.
    """
    metadata, names = from_json(reader.blob(BLOB), where)
    planner = metadata.planner_data
    paths = {} if planner is None else planner_paths(planner)
    stored = _Stored(reader, names)
    tree = _Node()
    try:
        for fqn, entry in metadata.state_dict_metadata.items():
            is_bytes = isinstance(entry, BytesStorageMetadata)
            value = stored.value(fqn) if is_bytes else stored.tensor(fqn, entry)
            tree.put(paths.get(fqn, (fqn,)), value)
        stored.fill()
        return {key: _finished(value) for key, value in tree.items()}
    except CorruptDataError as error:
        raise CorruptDataError(f"{where}: {error}") from error


class _Stored:
    """The tensors that hold the pieces."""

    def __init__(self, reader: _core.Reader, names: dict[MetadataIndex, str]) -> None:
        self._reader, self._names = reader, names
        self._tensors = {t[0]: (number, t[1], t[2]) for number, t in enumerate(reader.tensors())}
        #: The pieces to read at the end, on all threads: tensor index, address, bytes.
        self._wanted: list[tuple[int, int, int]] = []

    def _find(self, fqn: str, offset: tuple[int, ...] | None) -> tuple[int, str, tuple[int, ...]]:
        index = MetadataIndex(fqn, None if offset is None else torch.Size(offset))
        name = self._names.get(index, "")
        found = self._tensors.get(name)
        if found is None and name + MARK in self._tensors:
            what = f"{fqn!r} wraps other tensors: load it with torch.distributed.checkpoint"
            raise UnsupportedFormatError(what)
        if found is None:
            raise CorruptDataError(f"{fqn!r} has no piece{f' at {offset}' if offset else ''}")
        return found

    def value(self, fqn: str) -> Any:
        """A value that is not a tensor."""
        number, kind, shape = self._find(fqn, None)
        if kind != "uint8" or len(shape) != 1:
            raise CorruptDataError(f"{fqn!r} is stored as a tensor")
        values = torch.empty(shape, dtype=torch.uint8, device="cpu")
        if values.numel():
            self._reader.read_into([(number, values.data_ptr(), values.nbytes)], None)
        stream = io.BytesIO(values.numpy().tobytes())
        if _is_json(stream):
            return _from_json(fqn, stream)
        try:
            return _from_pickle(fqn, stream)
        except UnsafeLoadError as error:
            raise UnsafeLoadError(str(error), key_path=fqn) from error

    def tensor(self, fqn: str, entry: TensorStorageMetadata) -> torch.Tensor:
        """A tensor, put together from its pieces. Pieces that are contiguous in it are read later,
        by `fill`; the others are read here, one by one.
        """
        size, dtype = tuple(entry.size), entry.properties.dtype
        pieces = _pieces(fqn, size, [_record(chunk) for chunk in entry.chunks])
        numbers = {}
        # Checked before allocating: metadata may claim any size, but the pieces must exist.
        for offset, lengths in pieces.items():
            numbers[offset], kind, shape = self._find(fqn, offset)
            if (kind, shape) != (dtype_name(dtype), lengths):
                said = f"but {dtype_name(dtype)} of {lengths} in the metadata"
                raise CorruptDataError(
                    f"{fqn!r}: the piece at {offset} is {kind} of {shape}, {said}"
                )
        whole = torch.empty(size, dtype=dtype, device="cpu")
        for offset, lengths in pieces.items():
            place = whole[tuple(slice(a, a + n) for a, n in zip(offset, lengths, strict=True))]
            if not place.numel():
                continue
            if place.is_contiguous():
                self._wanted.append((numbers[offset], place.data_ptr(), place.nbytes))
                continue
            part = torch.empty(lengths, dtype=dtype, device="cpu")
            self._reader.read_into([(numbers[offset], part.data_ptr(), part.nbytes)], None)
            place.copy_(part)
        return whole

    def fill(self) -> None:
        """Read the remaining pieces."""
        if self._wanted:
            self._reader.read_into(self._wanted, None)


def _record(chunk: Any) -> ChunkStorageMetadata:
    """A piece in the form that `_pieces` checks."""
    record = ChunkStorageMetadata()
    record.state = {"offsets": tuple(chunk.offsets), "sizes": tuple(chunk.sizes)}
    return record
