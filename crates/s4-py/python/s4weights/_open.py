"""`open`: the tensors of one file, one by one or in part."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from . import _core
from ._errors import LimitError
from ._load import layouts_of
from ._names import unique, walk_tensors
from ._save import require_little_endian
from ._sources import FileLike, is_url, open_source, require_s4w
from ._storages import is_of_signal
from ._torch import require_torch

if TYPE_CHECKING:
    import torch


class _Saved(NamedTuple):
    """A saved tensor, without its values, and the index of its storage in the file."""

    tensor: torch.Tensor
    number: int


class File(Mapping[str, Any]):
    """A ``.s4w`` file from which individual tensors, or parts of them, can be read.

    Several threads may call its methods at the same time. It is a mapping from key paths to whole
    tensors.
    """

    def __init__(
        self, name: str, reader: _core.Reader, device: Any, weights_only: bool | None
    ) -> None:
        import torch

        self._name = name
        self._reader: _core.Reader | None = reader
        self._device = torch.device("cpu" if device is None else device)
        layouts = layouts_of(reader, weights_only)
        self._saved: dict[str, _Saved] = {}
        for path, tensor in walk_tensors(layouts.obj, as_state=True):
            if not torch.nn.parameter.is_lazy(tensor) and tensor.layout is torch.strided:
                # Tensors that stand in for others are on storages that the file does not have.
                number = layouts.numbers.get(tensor.untyped_storage()._cdata)
                if number is not None:
                    self._saved[unique(path, self._saved)] = _Saved(tensor, number)

    def __repr__(self) -> str:
        state = "closed" if self._reader is None else f"{len(self)} tensors"
        return f"<s4weights.File {self._name!r}: {state}>"

    def __enter__(self) -> File:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Tensors that have been read remain valid."""
        self._reader = None

    # As a mapping it would be compared by reading all tensors, of which none is just true or false.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __len__(self) -> int:
        return len(self._saved)

    def __iter__(self) -> Iterator[str]:
        return iter(self._saved)

    def __contains__(self, key: object) -> bool:
        # Otherwise the tensor would be read to find out.
        return key in self._saved

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.get_tensor(key)

    def metadata(self) -> dict[str, str]:
        """Return the metadata that was saved with the object."""
        return self._open().metadata()

    def get_tensor(self, key: str) -> torch.Tensor:
        """Return the tensor at a key path. Raises `KeyError` if there is none."""
        return self.get_slice(key)[...]

    def get_slice(self, key: str) -> Slice:
        """Return a tensor that can be read in parts: ``f.get_slice("w")[10:20, :]``. Raises
        `KeyError` if there is no tensor with this key path.
        """
        if key not in self._saved:
            close = difflib.get_close_matches(str(key), self._saved, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise KeyError(f"{self._name}: no tensor at {key!r}{hint}")
        return self._part(key)

    def _part(self, key: str) -> Slice:
        return Slice(self, key, self._saved[key])

    def _open(self) -> _core.Reader:
        if self._reader is None:
            raise ValueError("the file is closed")
        return self._reader


class Slice:
    """A tensor that is read when it is indexed.

    Only the chunks that the index needs are decoded, each as a whole. A chunk has 64 Ki to 256 Ki
    values, or fewer at the end of a tensor.
    """

    def __init__(self, file: File, key: str, saved: _Saved) -> None:
        self._file, self._key, self._saved = file, key, saved

    def __repr__(self) -> str:
        return f"<s4weights.Slice {self._key!r}: {self.get_dtype()} {self.get_shape()}>"

    def get_shape(self) -> list[int]:
        """Return the size of each dimension."""
        return list(self._saved.tensor.shape)

    def get_dtype(self) -> torch.dtype:
        """Return the dtype."""
        return self._saved.tensor.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read a part of the tensor.

        The index may consist of integers, lists of integers, slices (with positive steps), ``None``
        and ``...``, with the same meaning as for a tensor. For a list, everything from its smallest
        to its largest index is read.
        """
        saved = self._saved.tensor
        ranges, rest = ranges_of(index, saved.shape, self._key)
        try:
            part = self._values(ranges, rest)
        except NotImplementedError as error:
            dtype = str(saved.dtype).removeprefix("torch.")
            what = f"`{self._key}`: PyTorch does not support this index for a tensor of {dtype}"
            raise NotImplementedError(what) from error
        except RuntimeError as error:
            if is_of_signal(error):
                raise
            # A tensor of few stored values may be expanded to any size.
            raise LimitError(f"not enough memory for `{self._key}`: {error}") from error
        return part.to(self._file._device)

    def _values(self, ranges: list[tuple[int, int]], rest: tuple[Any, ...]) -> torch.Tensor:
        """Read what `ranges_of` returned, into host memory."""
        import torch

        saved, number = self._saved
        item = saved.element_size()
        if not saved.is_contiguous():
            # Not contiguous: its whole storage is read.
            nbytes = saved.untyped_storage().nbytes()
            storage = torch.UntypedStorage(nbytes)
            self._read(number, (0, 1, (nbytes,)), [(0, nbytes)], storage)
            values = torch.empty(0, dtype=saved.dtype, device="cpu").set_(
                storage, saved.storage_offset(), saved.shape, saved.stride()
            )
            part = values[tuple(slice(*r) for r in ranges)][rest].contiguous()
        else:
            shape = [end - start for start, end in ranges]
            part = torch.empty(shape, dtype=saved.dtype, device="cpu")
            array = (saved.storage_offset() * item, item, tuple(saved.shape))
            self._read(number, array, ranges, part.untyped_storage())
            part = part[rest]
            part = part if part.is_contiguous() else part.contiguous()
        part = part.conj() if saved.is_conj() else part
        return torch._neg_view(part) if saved.is_neg() else part

    def _read(
        self,
        number: int,
        array: tuple[int, int, Sequence[int]],
        part: list[tuple[int, int]],
        storage: torch.UntypedStorage,
    ) -> None:
        if storage.nbytes():
            memory = (storage.data_ptr(), storage.nbytes())
            self._file._open().read_view(number, array, part, memory)


def ranges_of(
    what: Any, shape: Sequence[int], key: str
) -> tuple[list[tuple[int, int]], tuple[Any, ...]]:
    """The range of each dimension that an index needs, and the index to apply to what was read."""
    items = list(what) if isinstance(what, tuple) else [what]
    dots = [at for at, one in enumerate(items) if one is ...]
    if len(dots) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    missing = len(shape) - sum(one is not None and one is not ... for one in items)
    if missing < 0:
        raise IndexError(f"too many indices for `{key}` of {len(shape)} dimensions")
    at = dots[0] if dots else len(items)
    # An ellipsis for no dimension still tells NumPy how to arrange the result.
    items[at : at + (1 if missing else 0) * len(dots)] = [slice(None)] * missing
    ranges: list[tuple[int, int]] = []
    rest: list[Any] = []
    for one in items:
        if one is None or one is ...:
            rest.append(one)
            continue
        bounds, left = _range_of(one, shape[len(ranges)], len(ranges))
        ranges.append(bounds)
        rest.append(left)
    return ranges, tuple(rest)


def _range_of(one: Any, size: int, dimension: int) -> tuple[tuple[int, int], Any]:
    """Like `ranges_of`, for one dimension."""
    if isinstance(one, slice):
        start, stop, step = one.indices(size)
        if step <= 0:
            raise ValueError("step must be greater than zero")
        return (start, max(start, stop)), slice(None, None, step)
    if isinstance(one, (list, range)) or (getattr(one, "ndim", 0) == 1 and _has_integers(one)):
        numbers = [_number(n, size, dimension) for n in one]
        first, last = min(numbers, default=0), max(numbers, default=-1)
        return (first, last + 1), [number - first for number in numbers]
    number = _number(one, size, dimension)
    return (number, number + 1), 0


def _has_integers(array: Any) -> bool:
    """Whether the values of an array or a tensor are positions."""
    dtype = str(array.dtype)
    # PyTorch takes a tensor of uint8 for a mask.
    is_mask = dtype == "torch.uint8"
    return dtype.removeprefix("torch.").startswith(("int", "uint")) and not is_mask


def _number(one: Any, size: int, dimension: int) -> int:
    is_array = hasattr(one, "dtype")
    dimensions = getattr(one, "ndim", 0)
    fits = _has_integers(one) and dimensions == 0 if is_array else not isinstance(one, bool)
    try:
        number = index(one) if fits else None
    except TypeError:
        number = None
    if number is None:
        kind = type(one).__name__
        given = f"{kind} of {one.dtype} in {dimensions} dimensions" if is_array else kind
        what = f"expected integers, lists of integers, slices, None or ..., not {given}"
        raise TypeError(what)
    if not -size <= number < size:
        where = f"dimension {dimension} with size {size}"
        raise IndexError(f"index {number} is out of bounds for {where}")
    return number % size


def open(
    f: FileLike,
    device: Any = "cpu",
    *,
    weights_only: bool | None = None,
    threads: int | None = None,
    storage_options: Mapping[str, str] | None = None,
    trusted: bool = False,
) -> File:
    """Open a ``.s4w`` file to read individual tensors or parts of them::

        with s4weights.open("step100.s4w", device="cuda") as f:
            rows = f.get_slice("model.embed.weight")[1000:2000]
            bias = f.get_tensor("model.layers.0.bias")

    Opening a file reads only its index; tensors are decoded when they are accessed.

    Args:
        f: as in `load`.
        device: the device of the tensors. They are decoded on the host and copied to it.
        weights_only: as in `load`, for pickled objects.
        threads: as in `load`.
        storage_options: as in `save`.
        trusted: as in `load`.

    Raises:
        UnsupportedFormatError: the file is not a ``.s4w`` file.
        S4Error: any other failure, as in `load`.
    """
    require_torch("open")
    require_little_endian()
    source = require_s4w(open_source(f, storage_options, threads, trusted))
    return File(name_of(f), source, device, weights_only)


def name_of(f: FileLike) -> str:
    if not isinstance(f, (str, os.PathLike)):
        return type(f).__name__
    if not is_url(f):
        return os.fspath(f)
    # Without passwords and signatures.
    parts = urlsplit(str(f))
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
