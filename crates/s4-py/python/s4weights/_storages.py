"""Storages on their way to the file and back.

What is stored are whole storages, as PyTorch does, keyed by identity: so views, strides, ties and
aliases come back as they were. A storage is written as one tensor of the file, under the key path,
dtype and shape of the first tensor that uses it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _core
from ._device import HOST, Compute, Places
from ._errors import CorruptDataError, LimitError, S4Error
from ._names import UniqueNames
from ._progress import Progress

if TYPE_CHECKING:
    import torch

#: Bytes of host memory that storages of other devices may take at a time, in either direction.
STAGING_BYTES = 256 << 20
#: Bytes that are read ahead into a GPU, where they need not go any further.
AHEAD_BYTES = 1 << 30

_DTYPES = frozenset(_core.dtypes())


class Hint(NamedTuple):
    """What is known of a storage from the first tensor that uses it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] | None


class Entry(NamedTuple):
    """A storage, and the name, dtype and shape of the stored tensor that it becomes."""

    storage: torch.UntypedStorage
    name: str
    dtype: str
    shape: tuple[int, ...]


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """The format's name of a dtype. One that it has no name for is stored as bytes."""
    name = str(dtype).removeprefix("torch.")
    return name if name in _DTYPES else "bytes"


def covering_shape(
    tensor: torch.Tensor, storage: torch.UntypedStorage | None = None
) -> tuple[int, ...] | None:
    """The tensor's shape, if its elements in order are all there is in its storage."""
    storage = storage or tensor.untyped_storage()
    whole = (
        tensor.is_contiguous()
        and tensor.nbytes == storage.nbytes()
        and tensor.storage_offset() == 0
    )
    return tensor.shape if whole else None


class StorageWriter:
    """Numbers storages in the order in which they are met, then writes them in that order."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        # Of tensors that were described, by `id`: while the object that is saved keeps them.
        self._tensors: dict[int, int] = {}
        self._entries: list[Entry] = []
        self._names = UniqueNames()
        # Kinds of the devices that were met, which PyTorch makes a new text of for whoever asks.
        self._kinds: dict[torch.device, str] = {}
        self.nbytes = 0

    def number(self, storage: torch.UntypedStorage, hint: Callable[[], Hint]) -> int:
        """The number of a storage; ``hint`` is asked when it is met for the first time."""
        found = self.find_storage(storage)
        return self.add(storage, *hint()) if found is None else found

    def find_storage(self, storage: torch.UntypedStorage) -> int | None:
        """The number of a storage, if it has been met."""
        # The entry keeps the storage alive, so that the address is its alone.
        return self._numbers.get(storage._cdata)

    def add(
        self,
        storage: torch.UntypedStorage,
        name: str,
        dtype: torch.dtype,
        shape: tuple[int, ...] | None,
    ) -> int:
        """Numbers a storage that has not been met before, from what a `Hint` knows."""
        if storage.device not in self._kinds:
            self._kind(storage)
        nbytes, kind = storage.nbytes(), dtype_name(dtype)
        if shape is None:
            item = dtype.itemsize
            if nbytes % item:
                kind, item = "bytes", 1
            shape = (nbytes // item,)
        number = self._numbers[storage._cdata] = len(self._entries)
        self._entries.append(Entry(storage, self._names.take(name), kind, shape))
        self.nbytes += nbytes
        return number

    def _kind(self, storage: torch.UntypedStorage) -> str:
        """The kind of a storage's device."""
        device = storage.device
        kind = self._kinds.get(device)
        if kind is None:
            kind = self._kinds[device] = device.type
        return kind

    def note(self, tensor: Any, number: int) -> None:
        """Remembers the number of a tensor's storage, for `find`; the caller keeps the tensor."""
        self._tensors[id(tensor)] = number

    def entry(self, number: int) -> Entry:
        """What has been noted of a storage."""
        return self._entries[number]

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> list[Entry]:
        """Everything that has been noted, in order."""
        return self._entries

    def find(self, tensor: Any) -> int | None:
        """The number of the storage of a tensor, if it has been met."""
        known = self._tensors.get(id(tensor))
        if known is not None:
            return known
        try:
            return self._numbers.get(tensor.untyped_storage()._cdata)
        except Exception:  # Wrappers without a storage of their own.
            return None

    def engine(self, compute: Compute) -> _core.CudaEngine | None:
        """The engine for the CUDA devices that storages are on; ``None`` if there are none, or if
        their values are to go through host memory.
        """
        if "cuda" not in self._kinds.values():
            return None
        there = {
            entry.storage.device.index
            for entry in self._entries
            if self._kind(entry.storage) == "cuda" and entry.storage.nbytes()
        }
        return compute.engine(there) if there else None

    def write(
        self, writer: _core.Writer, groups: Sequence[int], progress: Progress, compute: Compute
    ) -> None:
        """Hands all storages, and the group of each, to the native writer: those of the host and of
        CUDA devices as they are, others copied to the host a few at a time.
        """
        engine = self.engine(compute)
        on_host = all(kind == "cpu" for kind in self._kinds.values())
        places = Places()
        batch: list[Any] = []
        kinds: list[int] = []
        staged: list[torch.UntypedStorage] = []
        staged_bytes = 0
        for entry, group in zip(self._entries, groups, strict=True):
            storage = entry.storage
            nbytes = storage.nbytes()
            where = HOST
            if engine is not None and nbytes:
                where = places.of(storage)
            if not on_host and where == HOST and self._kind(storage) != "cpu":
                if staged and staged_bytes + nbytes > STAGING_BYTES:
                    _write_batch(writer, engine, batch, kinds, progress)
                    batch, kinds, staged, staged_bytes = [], [], [], 0
                storage = storage.cpu()
                staged.append(storage)
                staged_bytes += nbytes
            address = storage.data_ptr() if nbytes else 0
            if engine is None:
                batch.append((entry.name, entry.dtype, entry.shape, address, nbytes))
            else:
                batch.append((entry.name, entry.dtype, entry.shape, address, nbytes, where))
            kinds.append(group)
        _write_batch(writer, engine, batch, kinds, progress)


def write_sources(
    writer: _core.Writer,
    engine: _core.CudaEngine | None,
    sources: list[_core.PlacedSource],
    groups: Sequence[int],
    progress: Progress,
    check: Callable[[], None],
    ahead: int,
) -> None:
    """Hands values to the native writer, wherever they are. What ``check`` raises ends that. ``ahead``:
    bytes of encoded values of CUDA devices that may wait to be written.
    """
    report = progress.native()

    def watch(done: int) -> None:
        check()
        if report is not None:
            report(done)

    there = sources if engine else [source[:5] for source in sources]
    _write(writer, engine, there, bytes(groups), watch, ahead)
    progress.advance(sum(source[4] for source in sources))


def _write_batch(
    writer: _core.Writer,
    engine: _core.CudaEngine | None,
    batch: list[Any],
    groups: list[int],
    progress: Progress,
) -> None:
    _write(writer, engine, batch, bytes(groups), progress.native())
    progress.advance(sum(tensor[4] for tensor in batch))


def _write(
    writer: _core.Writer,
    engine: _core.CudaEngine | None,
    sources: list[Any],
    groups: bytes,
    progress: _core.Progress | None,
    ahead: int | None = None,
) -> None:
    """``sources`` say where they are if there is an engine."""
    if engine is None:
        writer.write(sources, groups, progress)
    else:
        writer.write_placed(engine, sources, groups, progress, ahead)


class StorageReader:
    """Fetches storages from a file, many at a time, and copies them to their destinations."""

    def __init__(
        self,
        reader: _core.Reader,
        infos: list[_core.TensorInfo],
        map_location: Any,
        progress: Progress,
        compute: Compute,
        wanted: frozenset[int] | None = None,
    ) -> None:
        import torch

        self._reader = reader
        self._wanted = wanted
        self._progress = progress
        self._compute = compute
        self._tls = torch.serialization._serialization_tls
        self._fake = torch._guards.detect_fake_mode(None) is not None
        self._cpu = torch.device("cpu")
        self._map_location = map_location
        self._restore = torch.serialization._get_restore_location(map_location)
        self._meta = (
            isinstance(map_location, (str, torch.device))
            and torch.device(map_location).type == "meta"
        )
        self._infos = infos
        self._ahead: dict[int, torch.UntypedStorage] = {}
        self._done: dict[int, torch.UntypedStorage] = {}
        self._sizes: dict[int, int] = {}
        # A function may do anything with a storage: it gets what was read.
        self._devices: dict[str, torch.device | None] | None = (
            None if callable(map_location) else {}
        )
        self._waiting: list[tuple[int, torch.UntypedStorage]] | None = None
        # Whether `new_tensor` makes any; `None` until it is asked.
        self._makes: bool | None = None

    def __len__(self) -> int:
        return len(self._infos)

    def info(self, number: int) -> _core.TensorInfo:
        """Name, dtype, shape and bytes of a storage, as the file has them."""
        if not 0 <= number < len(self._infos):
            raise CorruptDataError(f"object refers to tensor {number} of {len(self._infos)}")
        return self._infos[number]

    def get(self, number: int, location: str) -> torch.UntypedStorage:
        """The storage with this number, on the device that its tag and ``map_location`` say."""
        storage = self._done.get(number)
        if storage is None:
            storage = self._done[number] = self._place(number, location)
            self._sizes[number] = storage.nbytes()
        return storage

    def new_tensor(
        self, number: int, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> torch.Tensor | None:
        """A tensor that is all there is in a storage of the host, which is to be filled later; ``None``
        if that is not what `get` would give.
        """
        if self._makes is None:
            self._makes = self._makes_tensors()
        if not self._makes or number in self._done:
            return None
        import torch

        try:
            tensor = torch.empty(shape, dtype=dtype, device=self._cpu)
        except RuntimeError:  # `get` says what is wrong.
            return None
        storage, nbytes = tensor.untyped_storage(), self._infos[number][3]
        if self._waiting is None or storage.nbytes() != nbytes:
            return None
        self._done[number], self._sizes[number] = storage, nbytes
        self._waiting.append((number, storage))
        return tensor

    def _makes_tensors(self) -> bool:
        """Whether new tensors of PyTorch's are what storages of the host would be put into."""
        import torch

        # In the last case they would be filled with something.
        return not (
            self._waiting is None
            or self._ahead
            or self._fake
            or self._meta
            or self._tls.skip_data
            or self._device_of("cpu") != self._cpu
            or torch.are_deterministic_algorithms_enabled()
        )

    def on_fake_device(self, tensor: torch.Tensor, location: str) -> torch.Tensor:
        """The tensor; under a `FakeTensorMode`, with the device that it would be on."""
        if self._fake:
            import torch

            where = self._map_location
            if isinstance(where, dict):
                where = where.get(location, location)
            elif callable(where):
                raise RuntimeError(
                    "a callable map_location is not supported under a FakeTensorMode"
                )
            tensor.fake_device = torch.device(location if where is None else where)
        return tensor

    def check_sizes(self) -> None:
        """Refuses views that PyTorch has made room for, with whatever was in memory there."""
        for number, storage in self._done.items():
            if storage.nbytes() > self._sizes[number]:
                name, _, _, nbytes = self.info(number)
                raise CorruptDataError(f"a view of `{name}` lies outside of its {nbytes} bytes")

    def _place(self, number: int, location: str) -> torch.UntypedStorage:
        import torch

        nbytes = self.info(number)[3]
        if self._fake or self._meta:
            storage = torch.UntypedStorage(nbytes, device="meta")
            if self._fake:
                storage._fake_device = location
            return storage
        if self._tls.skip_data:
            return self._restore(_allocate(nbytes), location)
        device = self._device_of(location)
        if self._waiting is not None and device is not None and number not in self._ahead:
            storage = _allocate(nbytes, device)
            self._waiting.append((number, storage))
            return storage
        if number not in self._ahead:
            self._fetch(number, device or torch.device("cpu"))
        storage = self._ahead.pop(number)
        if storage.device == device:
            return storage
        # What was read ahead belongs elsewhere.
        return self._restore(storage.cpu(), location)

    def _device_of(self, location: str) -> torch.device | None:
        """The device of a tag, if storages are read straight into its memory."""
        import torch

        if self._devices is None:
            return None
        if location not in self._devices:
            # PyTorch says which device it is, and what is wrong with it.
            device = self._restore(torch.UntypedStorage(0), location).device
            on_gpu = device.type == "cuda" and self._compute.engine((device.index,)) is not None
            self._devices[location] = device if on_gpu or device.type == "cpu" else None
        return self._devices[location]

    def defer(self) -> None:
        """Storages are filled by `fill`, all at once: nobody may look at values before."""
        self._waiting = []

    def fill(self) -> None:
        """Reads the storages that were handed out since `defer`."""
        waiting, self._waiting = self._waiting or [], None
        self._read(waiting)

    def numbers(self) -> dict[int, int]:
        """The numbers of the storages that were handed out, by identity."""
        return {storage._cdata: number for number, storage in self._done.items()}

    def _fetch(self, first: int, device: torch.device) -> None:
        """Reads a storage and those that will be asked for next: a batch is read in parallel."""
        batch: list[tuple[int, torch.UntypedStorage]] = []
        budget = STAGING_BYTES if device.type == "cpu" else AHEAD_BYTES
        for number in range(first, len(self._infos)):
            nbytes = self._infos[number][3]
            if number in self._ahead or number in self._done:
                continue
            if self._wanted is not None and number not in self._wanted:
                continue
            if batch and nbytes > budget:
                break
            budget -= nbytes
            batch.append((number, _allocate(nbytes, device)))
        self._read(batch)
        self._ahead.update(batch)

    def _read(self, batch: list[tuple[int, torch.UntypedStorage]]) -> None:
        places = Places()
        requests = [(n, s.data_ptr(), s.nbytes(), places.of(s)) for n, s in batch if s.nbytes()]
        read_batch(self._reader, self._compute, requests, self._progress, new=True)


def read_batch(
    reader: _core.Reader,
    compute: Compute,
    batch: list[_core.PlacedRequest],
    progress: Progress,
    new: bool = False,
) -> None:
    """Reads into memory of the host and of CUDA devices; ``new``: memory of the host that nobody has
    written to yet.
    """
    host = [request[:3] for request in batch if request[3] == HOST]
    if host:
        reader.read_into(host, progress.native(), new)
        progress.advance(sum(nbytes for _, _, nbytes in host))
    there = [request for request in batch if request[3] != HOST]
    engine = compute.engine({request[3][0] for request in there}) if there else None
    if engine is not None:
        reader.read_into_device(engine, there, progress.native())
        progress.advance(sum(request[2] for request in there))


def _allocate(nbytes: int, device: torch.device | None = None) -> torch.UntypedStorage:
    import torch

    if device is not None and device.type != "cpu":
        # If there is no room, PyTorch's own error says what takes it.
        return torch.UntypedStorage(nbytes, device=device)
    try:
        return torch.UntypedStorage(nbytes)
    except RuntimeError as error:
        raise LimitError(f"no memory for a tensor of {nbytes} bytes: {error}") from error


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor is elements at strides of a storage, each of its element size."""
    return strided_test()(tensor)


@functools.cache
def strided_test() -> Callable[[torch.Tensor], bool]:
    """`is_strided`, with what it needs of PyTorch looked up: for who asks it of thousands."""
    import torch

    strided, is_wrapped = torch.strided, torch._C._functorch.is_functorch_wrapped_tensor

    def test(tensor: torch.Tensor) -> bool:
        return bool(
            tensor.layout is strided
            and (tensor.is_cpu or tensor.is_cuda)
            and not tensor.is_quantized
            and not tensor.is_nested
            and not tensor._is_zerotensor()
            and not is_wrapped(tensor)
        )

    return test


def require_storage(tensor: torch.Tensor, path: str) -> None:
    """Refuses a tensor whose storage was taken away, as sharding libraries do: the file would hold
    nothing of it, and nobody could load it.
    """
    storage, item = tensor.untyped_storage(), tensor.element_size()
    if not fits(storage.nbytes(), item, tensor.storage_offset(), tensor.shape, tensor.stride()):
        raise S4Error(
            f"cannot save `{path}`: a tensor of shape {list(tensor.shape)} whose storage has "
            f"{storage.nbytes()} bytes; was it freed?"
        )


def fits(nbytes: int, item: int, offset: int, shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a view of so many elements, at such strides, lies within a storage."""
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return 0 in shape or (last + 1) * item <= nbytes
