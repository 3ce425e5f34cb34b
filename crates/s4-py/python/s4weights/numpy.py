"""Save and load ``.s4w`` files with NumPy arrays, without PyTorch. Arrays are saved as tensors, and
tensors are loaded as arrays.

::

    import s4weights.numpy

    s4weights.numpy.save({"w": weights, "step": 100}, "step100.s4w")
    state = s4weights.numpy.load("step100.s4w")
    with s4weights.numpy.open("step100.s4w") as f:
        rows = f.get_slice("w")[1000:2000]

The files have the same format as those of `s4weights.save` and `s4weights.load`. Dtypes that NumPy
does not have, such as bfloat16, are provided by `ml_dtypes`, if it is installed. JAX arrays can
also be saved, and are loaded as NumPy arrays. Pickled objects can only be loaded with PyTorch.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from . import _core
from ._collection import without_collection
from ._device import is_array
from ._errors import CorruptDataError, LimitError, UnsupportedFormatError
from ._names import join, unique
from ._open import File, Slice, name_of, ranges_of
from ._progress import Progress, ProgressArgument
from ._report import Recorder
from ._save import InTurn, absolute, new_writer, require_little_endian
from ._select import select
from ._sources import FileLike, open_source, require_s4w, texts_of
from ._storages import is_of_signal, signal_code
from ._tree import TreeDecoder, brief, natural, row_major

__all__ = ["ArrayFile", "ArraySlice", "load", "open", "save"]

_Array = np.ndarray[Any, Any]


def save(
    obj: object,
    f: FileLike,
    *,
    preset: str = "balanced",
    threads: int | None = None,
    progress: ProgressArgument = None,
    storage_options: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Save arrays in dicts, lists and tuples with plain values, as `s4weights.save` saves tensors.

    An array that occurs more than once is stored once; different arrays that share memory are
    stored separately.

    Args:
        obj: the object to save. NumPy scalars are saved as zero-dimensional arrays.
        f: as in `s4weights.save`, as are the other arguments, except that the preset cannot be
            ``"nvcomp"``.

    Returns:
        A report with sizes and times.

    Raises:
        UnsupportedFormatError: a value in the object is neither an array of numbers nor plain; the
            message describes the value and its location.
        S4Error: any other failure, as in `s4weights.save`.
    """
    require_little_endian()
    texts = texts_of("metadata", metadata)
    f = absolute(f)
    recorder, turn = Recorder("save", f), InTurn(f)
    with recorder.watch():
        arrays = _Arrays()
        tree = _core.write_tree(obj, arrays.add)
        if tree is None:
            raise UnsupportedFormatError(
                "only s4weights.save, with PyTorch, can save such an object: it has a list or dict that "
                "occurs twice, keys that are not plain, or more than a million values"
            )
        total = recorder.raw_bytes = sum(source[4] for source in arrays.sources)
        with contextlib.closing(Progress(progress, total, "save")) as tracker, turn.lock:
            try:
                turn.begin()
                writer = new_writer(f, preset, threads, storage_options, None)
                try:
                    with recorder.stage("encode"):
                        writer.write(arrays.sources, b"", tracker.native())
                    tracker.advance(total)
                    tracker.finish()
                    turn.wait()
                    with recorder.stage("publish"):
                        done = writer.finish(tree, {}, texts)
                except BaseException:
                    writer.abort()
                    raise
            finally:
                turn.end()
        report: dict[str, Any] = json.loads(done)
        recorder.stored_bytes, recorder.chain = report["bytes_out"], 1
    return report


def load(
    f: FileLike,
    *,
    threads: int | None = None,
    progress: ProgressArgument = None,
    storage_options: Mapping[str, str] | None = None,
    keys: Iterable[str] | None = None,
) -> Any:
    """Load a ``.s4w`` file, with its tensors as arrays. Arrays share memory if the tensors did.

    Args:
        f: as in `s4weights.load`, as are the other arguments.

    Returns:
        The object. PyTorch's own types become plain types: sizes become tuples, and dtypes and
        devices become their names.

    Raises:
        UnsupportedFormatError: the file is not a ``.s4w`` file, its object was pickled, NumPy does
            not have one of its dtypes, or it has sets of tensors.
        S4Error: any other failure, as in `s4weights.load`.
    """
    recorder = Recorder("load", f)
    with recorder.begin("open"):
        reader, infos = _open(f, threads, storage_options)
    with recorder.watch():
        recorder.look(reader, keys is None)
        tree, wanted = reader.tree(), None
        if keys is not None:
            if tree is None:
                raise UnsupportedFormatError("keys=: the file contains tensors by name, not an object")
            tree, wanted = select(tree, keys)
        total = sum(info[3] for n, info in enumerate(infos) if wanted is None or n in wanted)
        recorder.raw_bytes = total
        storages = _Storages(infos)
        with (
            recorder.stage("read"),
            contextlib.closing(Progress(progress, total, "load")) as tracker,
        ):
            decoder = _Decoder(storages)
            obj = without_collection(
                lambda: decoder.tensors() if tree is None else decoder.decode(tree)
            )
            reader.read_into(storages.requests(), tracker.native(), True)
            tracker.advance(total)
            tracker.finish()
    return obj


def open(
    f: FileLike,
    *,
    threads: int | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> ArrayFile:
    """Open a ``.s4w`` file to read individual arrays or parts of them, like `s4weights.open`.

    Raises the same errors as `load`.
    """
    reader, infos = _open(f, threads, storage_options)
    return ArrayFile(name_of(f), reader, infos)


class _Layout(NamedTuple):
    """A saved array without its values: where it is in the storage with index ``number``."""

    number: int
    dtype: Any
    shape: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]

    def on(self, storage: _Array) -> _Array:
        """The array as a view of its storage's bytes."""
        item = self.dtype.itemsize
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        # The stride of a dimension of size 1 may be more than NumPy can count.
        strides = [
            step * item if size > 1 else 0
            for size, step in zip(self.shape, self.stride, strict=True)
        ]
        array: _Array = np.ndarray(self.shape, self.dtype, storage, self.offset * item, strides)
        return array


class ArrayFile(File):
    """A ``.s4w`` file from which individual tensors, or parts of them, can be read as arrays.

    Several threads may call its methods at the same time. It is a mapping from key paths to whole
    arrays.
    """

    def __init__(self, name: str, reader: _core.Reader, infos: list[_core.TensorInfo]) -> None:
        self._name = name
        self._reader: _core.Reader | None = reader
        decoder, tree = _LayoutDecoder(_Storages(infos)), reader.tree()
        obj = decoder.tensors() if tree is None else decoder.decode(tree)
        self._saved: dict[str, Any] = {}
        for path, layout in _layouts(obj, ""):
            self._saved[unique(path, self._saved)] = layout

    def _part(self, key: str) -> Slice:
        return ArraySlice(self, key, self._saved[key])


class ArraySlice(Slice):
    """An array that is read when it is indexed.

    Only the chunks that the index needs are decoded, each as a whole. A chunk has 64 Ki to 256 Ki
    values, or fewer at the end of a tensor.
    """

    def __init__(self, file: ArrayFile, key: str, saved: _Layout) -> None:
        self._file, self._key, self._layout = file, key, saved

    def get_shape(self) -> list[int]:
        """Return the size of each dimension."""
        return list(self._layout.shape)

    def get_dtype(self) -> Any:
        """Return the dtype."""
        return self._layout.dtype

    def __getitem__(self, index: Any) -> _Array:
        """Read a part of the array.

        The index may consist of integers, lists of integers, slices (with positive steps), ``None``
        and ``...``, with the same meaning as for an array. For a list, everything from its smallest
        to its largest index is read.
        """
        ranges, rest = ranges_of(index, self._layout.shape, self._key)
        # With an ellipsis the result is an array even if no dimension is left.
        every = rest if any(one is ... for one in rest) else (*rest, ...)
        try:
            values: _Array = self._read_ranges(ranges)[every].copy(order="C")
        except MemoryError as error:
            # An array of few stored values may be expanded to any size.
            raise LimitError(f"not enough memory for `{self._key}`: {error}") from error
        return values

    def _read_ranges(self, ranges: list[tuple[int, int]]) -> _Array:
        """Read a range of each dimension."""
        layout = self._layout
        item = layout.dtype.itemsize
        reader = self._file._open()
        part: _Array
        if layout.stride == row_major(layout.shape):
            part = np.empty([end - start for start, end in ranges], layout.dtype)
            if part.nbytes:
                array = (layout.offset * item, item, layout.shape)
                memory = (part.ctypes.data, part.nbytes)
                reader.read_view(layout.number, array, ranges, memory)
        else:
            # Not contiguous: its whole storage is read.
            storage = np.empty(reader.tensors()[layout.number][3], np.uint8)
            if storage.nbytes:
                reader.read_into([(layout.number, storage.ctypes.data, storage.nbytes)], None, True)
            part = layout.on(storage)[tuple(slice(*r) for r in ranges)]
        return part


def _open(
    f: FileLike, threads: int | None, storage_options: Mapping[str, str] | None
) -> tuple[_core.Reader, list[_core.TensorInfo]]:
    require_little_endian()
    reader = require_s4w(open_source(f, storage_options, threads))
    if reader.form() == "pickle":
        raise UnsupportedFormatError(
            f"{name_of(f)}: the object was saved as a pickle: loading it requires PyTorch"
        )
    return reader, reader.tensors()


class _Arrays:
    """The arrays of an object, in the order in which they are found."""

    def __init__(self) -> None:
        #: Objects that own the memory to be read, to keep them alive.
        self._kept: list[Any] = []
        self.sources: list[_core.TensorSource] = []

    def add(self, obj: Any, path: str) -> int:
        """Add a new array and return its index."""
        # Subclasses may have more than values, as masked arrays do.
        is_numpy = type(obj) in (np.ndarray, np.memmap) or isinstance(obj, np.generic)
        if not is_numpy and not (is_array(obj) and hasattr(obj, "__array__")):
            raise UnsupportedFormatError(
                f"`{path}` has type {type(obj).__name__}: only arrays and plain values can be saved"
            )
        array = np.asarray(obj)
        name = array.dtype.name
        if array.dtype.kind not in "biufcV" or name not in _core.dtypes():
            raise UnsupportedFormatError(f"`{path}`: the format does not support dtype {name}")
        if not array.flags.c_contiguous or not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="), order="C")
        self._kept += (obj, array)
        address = array.ctypes.data if array.nbytes else 0
        place = (tuple(array.shape), address, array.nbytes)
        self.sources.append((path, name, *place))
        return len(self.sources) - 1


class _Storages:
    """The bytes behind the arrays. They are read once all arrays have been created."""

    def __init__(self, infos: list[_core.TensorInfo]) -> None:
        self._infos = infos
        self._on_signal = signal_code()
        self._found: dict[int, _Array] = {}

    def __len__(self) -> int:
        return len(self._infos)

    def is_of_caller(self, error: BaseException) -> bool:
        # No function of the caller's is called here.
        return is_of_signal(error, self._on_signal)

    def info(self, number: int) -> _core.TensorInfo:
        if number >= len(self._infos):
            raise CorruptDataError(f"the object refers to tensor {number}, but the file has {len(self._infos)} tensors")
        return self._infos[number]

    def get(self, number: int) -> _Array:
        found = self._found.get(number)
        if found is None:
            nbytes = self.info(number)[3]
            try:
                found = self._found[number] = np.empty(nbytes, np.uint8)
            except MemoryError as error:
                raise LimitError(f"not enough memory for a tensor of {nbytes} bytes: {error}") from error
        return found

    def requests(self) -> list[tuple[int, int, int]]:
        found = sorted(self._found.items())
        return [(n, bytes_.ctypes.data, bytes_.nbytes) for n, bytes_ in found if bytes_.nbytes]


class _LayoutDecoder(TreeDecoder):
    """Builds the object that a tree describes, with layouts for its arrays."""

    def __init__(self, storages: _Storages) -> None:
        # The base class is not initialised: it needs PyTorch.
        self._arrays = storages
        self._storages: Any = storages
        self._tensors: list[Any] = []

    def _size(self, sizes: tuple[int, ...]) -> Any:
        return sizes

    def _dtype(self, name: Any) -> Any:
        if type(name) is not str:
            raise CorruptDataError(f"corrupt data (tree): {brief(name)} is not a dtype")
        return name

    def _device(self, name: Any) -> Any:
        if type(name) is not str:
            raise CorruptDataError(f"corrupt data (tree): {brief(name)} is not a device")
        return name

    def _tensor(self, value: Any, node: dict[str, Any]) -> Any:
        number = natural(value)
        _, stored, shape, nbytes = self._arrays.info(number)
        dtype = _numpy_dtype(
            self._dtype(node.get("dtype", "uint8" if stored == "bytes" else stored))
        )
        made = self._made(_Layout(number, dtype, *self._extent(dtype, shape, nbytes, node)))
        self._tensors.append(made)
        return made

    def _made(self, layout: _Layout) -> Any:
        return layout


class _Decoder(_LayoutDecoder):
    """Builds the object that a tree describes, with arrays whose values are read later."""

    def _set(self, kind: Callable[[list[Any]], Any], items: list[Any]) -> Any:
        if any(map(_has_array, items)):
            raise UnsupportedFormatError("cannot load a set of tensors: arrays are not hashable")
        return super()._set(kind, items)

    def _made(self, layout: _Layout) -> Any:
        return layout.on(self._arrays.get(layout.number))


def _has_array(obj: Any) -> bool:
    """Whether something that belongs into a set is an array, or a tuple with one."""
    return isinstance(obj, np.ndarray) or (isinstance(obj, tuple) and any(map(_has_array, obj)))


def _layouts(obj: Any, path: str) -> Iterator[tuple[str, _Layout]]:
    """All layouts in an object, by key path."""
    if isinstance(obj, _Layout):
        yield path, obj
    elif isinstance(obj, dict):
        # Not `obj.items()`: an attribute of that name may hide the method.
        for key, value in type(obj).items(obj):
            yield from _layouts(value, join(path, key))
    elif isinstance(obj, (list, tuple)):
        for key, value in enumerate(obj):
            yield from _layouts(value, join(path, key))


@functools.cache
def _numpy_dtype(name: str) -> np.dtype[Any]:
    # NumPy has other dtypes with the names of the ones excluded here.
    kept = name in _core.dtypes() and not name.startswith(("q", "bits"))
    with contextlib.suppress(ImportError):
        import ml_dtypes  # noqa: F401  After this NumPy knows its dtypes.
    try:
        if kept:
            return np.dtype(name)
    except TypeError:
        pass
    raise UnsupportedFormatError(f"NumPy has no dtype {name}; installing ml_dtypes adds some dtypes")
