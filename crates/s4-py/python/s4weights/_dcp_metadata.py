"""The metadata of `torch.distributed.checkpoint` as JSON: none of it is pickled."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ._errors import CorruptDataError, UnsupportedFormatError

#: The version of the JSON; readers refuse others.
VERSION = 1

_MEMORY_FORMATS = {
    str(f).removeprefix("torch."): f
    for f in (
        torch.contiguous_format,
        torch.preserve_format,
        torch.channels_last,
        torch.channels_last_3d,
    )
}


def to_json(metadata: Metadata, names: dict[MetadataIndex, str]) -> bytes:
    """Metadata, with the name of the stored tensor that holds each piece.

    Raises `UnsupportedFormatError` if a custom planner added something that JSON cannot hold.
    """
    state = {fqn: _entry(fqn, value) for fqn, value in metadata.state_dict_metadata.items()}
    pieces = [
        [index.fqn, None if index.offset is None else list(index.offset), index.index, name]
        for index, name in names.items()
    ]
    planner = metadata.planner_data
    if planner is not None:
        planner = planner_paths(planner)
    everything = {"version": VERSION, "state": state, "planner": planner, "pieces": pieces}
    return json.dumps(everything, separators=(",", ":")).encode()


def from_json(text: bytes, where: str) -> tuple[Metadata, dict[MetadataIndex, str]]:
    """Read the output of `to_json`. ``where`` is for messages."""
    try:
        read = json.loads(text)
        if read["version"] != VERSION:
            what = f"{where}: unsupported version {read['version']!r} of distributed metadata"
            raise UnsupportedFormatError(what)
        state = {fqn: _metadata(entry) for fqn, entry in read["state"].items()}
        names = {
            MetadataIndex(fqn, None if offset is None else torch.Size(offset), index): str(name)
            for fqn, offset, index, name in read["pieces"]
        }
        planner = read["planner"]
        if planner is not None:
            planner = {fqn: tuple(path) for fqn, path in planner.items()}
    except (
        *(ValueError, TypeError, LookupError, AttributeError),
        *(OverflowError, RecursionError),
    ) as error:
        raise CorruptDataError(f"{where}: invalid distributed metadata: {error!r}") from error
    return Metadata(state, planner, dict(names)), names


def planner_paths(planner: Any) -> dict[str, tuple[str | int, ...]]:
    """The path of each entry in the nested state dict, which PyTorch's default planners record."""
    if not isinstance(planner, dict):
        raise UnsupportedFormatError(
            f"planner_data has type {type(planner).__name__}: only the data of PyTorch's default planners "
            "can be stored, since metadata is never pickled"
        )
    return {fqn: _path(fqn, path) for fqn, path in planner.items()}


def _path(fqn: str, path: Any) -> tuple[str | int, ...]:
    parts: list[Any] = list(path) if isinstance(path, (tuple, list)) else [None]
    for part in parts:
        if type(part) not in (str, int):
            raise UnsupportedFormatError(
                f"planner_data of {fqn!r} is {path!r}: expected a path of strings and integers"
            )
    return tuple(parts)


def _entry(fqn: str, value: Any) -> dict[str, Any]:
    if isinstance(value, BytesStorageMetadata):
        return {"kind": "bytes"}
    if not isinstance(value, TensorStorageMetadata):
        raise UnsupportedFormatError(f"{fqn!r} has metadata of unsupported type {type(value).__name__}")
    p = value.properties
    if p.layout is not torch.strided:
        raise UnsupportedFormatError(f"{fqn!r} has unsupported layout {p.layout}")
    # Older versions of PyTorch do not have them.
    strides = getattr(p, "strides", None)
    return {
        "kind": "tensor",
        "dtype": str(p.dtype).removeprefix("torch."),
        "requires_grad": p.requires_grad,
        "memory_format": str(p.memory_format).removeprefix("torch."),
        "pin_memory": p.pin_memory,
        **({} if strides is None else {"strides": list(strides)}),
        "size": list(value.size),
        "chunks": [[list(c.offsets), list(c.sizes)] for c in value.chunks],
    }


def _metadata(entry: dict[str, Any]) -> BytesStorageMetadata | TensorStorageMetadata:
    if entry["kind"] == "bytes":
        return BytesStorageMetadata()
    dtype = getattr(torch, entry["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry['dtype']!r} is not a dtype")
    properties = TensorProperties(
        dtype=dtype,
        requires_grad=bool(entry["requires_grad"]),
        memory_format=_MEMORY_FORMATS[entry["memory_format"]],
        pin_memory=bool(entry["pin_memory"]),
    )
    if "strides" in entry:
        properties.strides = tuple(int(stride) for stride in entry["strides"])
    chunks = [
        ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        for offsets, sizes in entry["chunks"]
    ]
    return TensorStorageMetadata(properties, torch.Size(entry["size"]), chunks)
