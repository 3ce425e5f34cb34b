"""Reads a folder that `torch.distributed.checkpoint` wrote as a state dict. No pickled code runs.

The metadata is a pickle. This module has stand-ins for its classes, which only keep what was
stored, and everything is checked before it is used. Pieces are files of `torch.save`, which
PyTorch's restricted unpickler reads.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import stat
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import _core
from ._cli_torch import is_no_memory
from ._dcp_metadata import planner_paths
from ._errors import (
    CorruptDataError,
    LimitError,
    NotFoundError,
    S4Error,
    UnsafeLoadError,
    UnsupportedFormatError,
)

METADATA = ".metadata"

#: The most bytes of metadata.
MAX_METADATA = 256 << 20
#: The most parts into which the edges of its pieces may divide a tensor.
MAX_PARTS = 1 << 24
#: The most levels of nested containers, and the most missing items of a list.
MAX_DEPTH, MAX_GAPS = 100, 1000

_MODULE = "torch.distributed.checkpoint.metadata"


class _Record:
    """A stand-in for a class: keeps what was stored of an object."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        state = self.state
        if type(state) is not dict or name not in state:
            raise CorruptDataError(f"metadata: {type(self).__name__} has no {name}")
        return state[name]


class Metadata(_Record): ...


class TensorStorageMetadata(_Record): ...


class BytesStorageMetadata(_Record): ...


class TensorProperties(_Record): ...


class ChunkStorageMetadata(_Record): ...


class MetadataIndex(_Record): ...


class StorageInfo(_Record): ...


#: The stand-ins for the classes and functions that metadata refers to.
_STAND_INS: dict[tuple[str, str], Any] = {
    **{
        (_MODULE, kind.__name__): kind
        for kind in (
            Metadata,
            TensorStorageMetadata,
            BytesStorageMetadata,
            TensorProperties,
            ChunkStorageMetadata,
            MetadataIndex,
        )
    },
    (_MODULE, "StorageMeta"): _Record,
    (_MODULE, "_MEM_FORMAT_ENCODING"): int,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StorageInfo,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    # The path that it was saved to, which is not used.
    **{
        (module, name): lambda *parts: None
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath")
    },
}


# The pure-Python unpickler: the one in C allocates its memo in whatever size a pickle asks for.
class _Unpickler(pickle._Unpickler):  # type: ignore[name-defined, misc, unused-ignore]
    def find_class(self, module: str, name: str) -> Any:
        found = _STAND_INS.get((module, name))
        if found is None and module == "torch":
            found = vars(torch).get(name)
            found = found if isinstance(found, torch.dtype) else None
        if found is None:
            full = f"{module}.{name}"
            message = f"{METADATA} needs `{full[:200]}`, which metadata written by PyTorch never needs"
            raise UnsafeLoadError(message, key_path=METADATA, global_name=full)
        return found


class _Place(NamedTuple):
    """The place of a piece."""

    file: str
    offset: int
    length: int


_Index = tuple[str, "tuple[int, ...] | None"]


def load_folder(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the state dict that PyTorch's `dcp_to_torch_save` would write.

    It has its original nesting, with each tensor in one piece. This takes memory for the result,
    and twice the size of the largest piece.

    Raises `NotFoundError` if there is no ``.metadata``, which PyTorch writes last;
    `UnsafeLoadError` if loading would run code; `CorruptDataError` if metadata and pieces are
    inconsistent; and `UnsupportedFormatError` for extensions, for planners other than PyTorch's,
    and for checkpoints saved through ``s4w://``.
    """
    where = os.fspath(folder)
    try:
        return _load(Path(folder))
    except UnsafeLoadError as error:
        message = f"{where}: {error}"
        raise UnsafeLoadError(
            message, key_path=error.key_path, global_name=error.global_name
        ) from error
    except (CorruptDataError, LimitError, NotFoundError, UnsupportedFormatError) as error:
        raise type(error)(f"{where}: {error}") from error


def _load(root: Path) -> dict[str, Any]:
    metadata = _read_metadata(root)
    entries = metadata.get("state_dict_metadata")
    if type(entries) is not dict or not all(type(fqn) is str for fqn in entries):
        raise CorruptDataError("metadata: no names of entries")
    places = _find_places(root, metadata.get("storage_data"))
    planner = metadata.get("planner_data")
    paths = {} if planner is None else planner_paths(planner)
    tree = _Node()
    for fqn, entry in entries.items():
        if type(entry) is TensorStorageMetadata:
            value = _tensor(root, places, fqn, entry)
        elif type(entry) is BytesStorageMetadata:
            value = _read(root, _find(places, fqn, None), fqn)
        else:
            raise CorruptDataError(f"metadata: {fqn!r} is neither a tensor nor bytes")
        tree.put(paths.get(fqn, (fqn,)), value)
    return {key: _finished(value) for key, value in tree.items()}


def _read_metadata(root: Path) -> Metadata:
    try:
        with open(root / METADATA, "rb") as file:
            text = file.read(MAX_METADATA + 1)
    except FileNotFoundError:
        what = f"no {METADATA}: not a complete torch.distributed.checkpoint folder"
        raise NotFoundError(what) from None
    _refuse_compressed(text[:16], METADATA)
    if len(text) > MAX_METADATA:
        raise LimitError(f"{METADATA} is larger than {MAX_METADATA} bytes")
    try:
        found = _Unpickler(io.BytesIO(text)).load()
    except S4Error:
        raise
    except Exception as error:  # whatever a damaged pickle makes of the unpickler
        raise CorruptDataError(f"{METADATA}: {str(error)[:200] or error!r}") from error
    if type(found) is not Metadata:
        raise CorruptDataError(f"{METADATA} contains no metadata")
    return found


def _find_places(root: Path, stored: Any) -> dict[_Index, _Place]:
    """The place of each piece. Checks that all lie within the folder's files without overlap."""
    if type(stored) is not dict:
        raise CorruptDataError("metadata: no list of pieces")
    places: dict[_Index, _Place] = {}
    for index, info in stored.items():
        if type(index) is not MetadataIndex or type(info) is not StorageInfo:
            raise UnsupportedFormatError("the pieces were not written by PyTorch's own file writer")
        fqn, offset = index.get("fqn"), index.state.get("offset")
        if type(fqn) is not str:
            raise CorruptDataError("metadata: a piece without a name")
        key = fqn, None if offset is None else _numbers(fqn, offset)
        places[key] = _place(fqn, info)
    sizes = {name: _size_of(root, name) for name in {place.file for place in places.values()}}
    for name in sizes:
        with open(root / name, "rb") as file:
            _refuse_compressed(file.read(16), name)
    end, before = 0, ""
    for place in sorted(places.values()):
        end = end if place.file == before else 0
        if place.offset < end or place.offset + place.length > sizes[place.file]:
            raise CorruptDataError(f"{place.file}: a piece lies outside the file or overlaps another one")
        end, before = place.offset + place.length, place.file
    return places


def _refuse_compressed(head: bytes, name: str) -> None:
    if _core.is_s4w(head):
        raise UnsupportedFormatError(
            f"{name} was saved through s4w://, so the folder is compressed already:"
            " load it with dcp.load and the same checkpoint_id"
        )


def _place(fqn: str, info: StorageInfo) -> _Place:
    if info.state.get("transform_descriptors"):
        raise UnsupportedFormatError(
            f"{fqn!r} was written through an extension of PyTorch's writer"
        )
    name, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
    if type(name) is not str or name in ("", ".", "..") or any(c in name for c in "/\\\0"):
        raise CorruptDataError(
            f"metadata: {fqn!r} refers to {str(name)[:200]!r}, which is not a file in the folder"
        )
    return _Place(name, *_numbers(fqn, (offset, length)))


def _size_of(root: Path, name: str) -> int:
    try:
        found = os.lstat(root / name)
    except FileNotFoundError:
        raise CorruptDataError(f"{name} is missing") from None
    if not stat.S_ISREG(found.st_mode):
        raise CorruptDataError(f"{name} is not a regular file")
    return found.st_size


def _numbers(fqn: str, values: Any) -> tuple[int, ...]:
    if type(values) is not tuple or len(values) > 64:
        raise CorruptDataError(f"metadata: {fqn!r} has no shape")
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in values):
        raise CorruptDataError(f"metadata: invalid numbers for {fqn!r}: {str(values)[:200]}")
    return values


def _find(places: dict[_Index, _Place], fqn: str, offset: tuple[int, ...] | None) -> _Place:
    try:
        return places[fqn, offset]
    except KeyError:
        at = "" if offset is None else f" at {offset}"
        raise CorruptDataError(f"{fqn!r} has no piece{at}") from None


def _tensor(
    root: Path, places: dict[_Index, _Place], fqn: str, entry: TensorStorageMetadata
) -> torch.Tensor:
    """A tensor, put together from its pieces."""
    size = _numbers(fqn, entry.get("size"))
    properties = entry.get("properties")
    about = properties.state if type(properties) is TensorProperties else None
    if type(about) is not tuple or not about or type(about[0]) is not torch.dtype:
        raise CorruptDataError(f"metadata: {fqn!r} has no dtype")
    dtype = about[0]
    pieces = _pieces(fqn, size, entry.get("chunks"))
    found = {offset: _find(places, fqn, offset) for offset in pieces}
    for offset, place in found.items():
        # Checked before allocating: metadata may claim any size, but the pieces must exist.
        if math.prod(pieces[offset]) * dtype.itemsize > place.length:
            raise CorruptDataError(f"{fqn!r}: the piece at {offset} is smaller than its values")
    if len(pieces) == 1:
        return _part(root, found.popitem()[1], fqn, size, dtype)
    whole = torch.empty(size, dtype=dtype, device="cpu")
    for offset, lengths in pieces.items():
        part = _part(root, found[offset], fqn, lengths, dtype)
        whole[tuple(slice(a, a + n) for a, n in zip(offset, lengths, strict=True))] = part
    return whole


def _pieces(fqn: str, size: tuple[int, ...], chunks: Any) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the pieces by their offsets. Checks that they make up the tensor: no value is
    missing, and none occurs twice.
    """
    if type(chunks) is not list or not all(type(c) is ChunkStorageMetadata for c in chunks):
        raise CorruptDataError(f"metadata: {fqn!r} has no pieces")
    pieces = {_numbers(fqn, c.get("offsets")): _numbers(fqn, c.get("sizes")) for c in chunks}
    for offset, lengths in pieces.items():
        fits = len(offset) == len(lengths) == len(size)
        if not fits or any(a + n > all for a, n, all in zip(offset, lengths, size, strict=True)):
            raise CorruptDataError(f"metadata: {fqn!r}: a piece of {lengths} at {offset} of {size}")
    edges = [
        sorted({0, n} | {o[d] for o in pieces} | {o[d] + s[d] for o, s in pieces.items()})
        for d, n in enumerate(size)
    ]
    parts = [len(e) - 1 for e in edges]
    if math.prod(parts) > MAX_PARTS:
        raise LimitError(f"{fqn!r} is cut into more than {MAX_PARTS} parts")
    number = [{edge: n for n, edge in enumerate(e)} for e in edges]
    covered = torch.zeros(parts, dtype=torch.int32, device="cpu")
    for offset, lengths in pieces.items():
        bounds = zip(number, offset, lengths, strict=True)
        covered[tuple(slice(of[a], of[a + n]) for of, a, n in bounds)] += 1
    if bool((covered != 1).any()):
        raise CorruptDataError(f"metadata: the pieces of {fqn!r} overlap or leave gaps")
    return pieces


def _part(
    root: Path, place: _Place, fqn: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    read = _read(root, place, fqn)
    if not isinstance(read, torch.Tensor) or read.layout is not torch.strided:
        raise CorruptDataError(f"{place.file}: {fqn!r} is not a plain tensor")
    read = read.detach()
    if tuple(read.shape) != shape or read.dtype != dtype:
        said = f"but {dtype} of {shape} in the metadata"
        raise CorruptDataError(
            f"{place.file}: {fqn!r} is {read.dtype} of {tuple(read.shape)}, {said}"
        )
    # Copied if its storage holds more, so that the rest is not kept.
    owns = read.is_contiguous() and read.untyped_storage().nbytes() == read.nbytes
    return read if owns else read.clone(memory_format=torch.contiguous_format)


def _read(root: Path, place: _Place, fqn: str) -> Any:
    """Load an object that `torch.save` wrote at a place."""
    with open(root / place.file, "rb", opener=_open) as file:
        file.seek(place.offset)
        values = io.BytesIO(file.read(place.length))
    try:
        return torch.load(values, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        message = f"{fqn!r} contains more than tensors and plain values: {str(error)[:500]}"
        raise UnsafeLoadError(message, key_path=fqn) from error
    except (MemoryError, OSError):
        raise
    except Exception as error:  # whatever PyTorch's reader raises
        if is_no_memory(error, place.length):
            raise MemoryError from error
        raise CorruptDataError(f"{place.file}: {fqn!r}: {str(error)[:500]}") from error


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0))


class _Node(dict[Any, Any]):
    """A container that is being filled. It becomes a list if its keys are numbers."""

    def put(self, path: tuple[str | int, ...], value: Any) -> None:
        if not 0 < len(path) <= MAX_DEPTH:
            raise CorruptDataError(f"metadata: a path of {len(path)} keys")
        node = self
        for key in path[:-1]:
            node = node.setdefault(key, _Node())
            if type(node) is not _Node:
                raise CorruptDataError(f"metadata: {path} leads through a value that is not a container")
        if path[-1] in node:
            raise CorruptDataError(f"metadata: {path} occurs twice")
        node[path[-1]] = value


def _finished(value: Any) -> Any:
    if type(value) is not _Node:
        return value
    done = {key: _finished(inner) for key, inner in value.items()}
    if any(type(key) is str for key in done):
        return done
    if min(done) < 0 or max(done) >= len(done) + MAX_GAPS:
        raise CorruptDataError(f"metadata: invalid list indices: {min(done)} to {max(done)}")
    # Items may be missing: empty containers were not saved.
    return [done.get(n) for n in range(max(done) + 1)]
