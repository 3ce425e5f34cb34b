"""Storages on their way to the file and back.

Whole storages are stored, keyed by identity, as in PyTorch: this preserves views, strides, ties and
aliases. A storage is written as one tensor of the file, under the key path, dtype and shape of the
first tensor that uses it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found,unused-ignore]
import functools
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _core
from ._collection import without_collection
from ._device import HOST, Compute, Places, current_streams
from ._errors import CorruptDataError, LimitError, S4Error
from ._progress import Progress

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("s4weights")

#: Bytes of host memory for storages on their way to or from other devices, at a time.
STAGING_BYTES = 256 << 20
#: Bytes that are read ahead into a GPU, where they stay.
AHEAD_BYTES = 1 << 30
#: The most dimensions of a tensor, as in the format.
MAX_RANK = 64
#: With this many storages or more, some are read while others are being created, in about as many
#: batches.
MANY, BATCHES = 1024, 6

_DTYPES = frozenset(_core.dtypes())


class Hint(NamedTuple):
    """Facts about a storage, from the first tensor that uses it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] | None


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """The format's name of a dtype; ``"bytes"`` if the format has no such dtype."""
    name = str(dtype).removeprefix("torch.")
    return name if name in _DTYPES else "bytes"


def covering_shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The tensor's shape, if its elements, in order, make up its whole storage, and a file can hold such a shape."""
    whole = (
        tensor.is_contiguous()
        and tensor.nbytes == tensor.untyped_storage().nbytes()
        and tensor.storage_offset() == 0
        and tensor.ndim <= MAX_RANK
    )
    return tensor.shape if whole else None


class StorageWriter:
    """Collects storages in the order in which they are found, then writes them in that order."""

    def __init__(self) -> None:
        self.native = _core.Storages()

    def write_tree(self, obj: object, yields_gil: bool = False) -> str | None:
        """The tree of an object as JSON; adds its storages. ``None`` if the object is not plain;
        this writer must then be discarded. ``yields_gil``: nobody waits for this thread, so it lets
        others have the GIL from time to time.
        """
        if yields_gil:
            return self.native.tree(obj, yields_gil=True)
        return without_collection(lambda: self.native.tree(obj))

    def find_roles(self, obj: object) -> str | None:
        """The role table (what each tensor is to the optimizer) as JSON, if there is one."""
        try:
            return without_collection(lambda: self.native.roles(obj))
        except Exception as error:
            # Roles only make files smaller, and containers of other classes may do anything.
            if is_of_signal(error):
                raise
            logger.debug("could not determine the roles of the tensors: %r", error)
            return None

    def number(self, storage: torch.UntypedStorage, hint: Callable[[], Hint]) -> int:
        """The index of a storage. If it is new it is added, with what ``hint`` returns."""
        found = self.native.find(storage)
        if found is None:
            name, dtype, shape = hint()
            # Names are UTF-8, which cannot hold lone surrogates.
            name = name.encode("utf-8", "backslashreplace").decode("utf-8")
            found = self.native.add(storage, name, dtype, shape)
        return found

    def nbytes(self) -> int:
        """Bytes of all storages."""
        return self.native.nbytes()

    def all(self) -> list[torch.UntypedStorage]:
        """All storages, in order."""
        return self.native.get(range(len(self.native)))

    def engine(self, compute: Compute) -> _core.CudaEngine | None:
        """The engine for the CUDA devices that storages are on, or ``None`` if there are none, or if
        their values must go through host memory.
        """
        there = self.native.devices()
        return compute.engine(there) if there else None

    def sources(
        self, engine: _core.CudaEngine | None, streams: Mapping[int, int] | None = None
    ) -> _core.Sources:
        """The places of the values. With an engine, those on CUDA devices are read there, on
        ``streams`` or else on the current ones.
        """
        if engine is not None and streams is None:
            streams = current_streams(self.native.devices())
        return self.native.sources(streams or {} if engine is not None else {})

    def write(self, writer: _core.Writer, progress: Progress, compute: Compute) -> None:
        """Pass all storages to the native writer: those on the host and on CUDA devices directly,
        others as copies on the host, a few at a time.
        """
        engine = self.engine(compute)
        sources = self.sources(engine)
        first = 0
        staged: list[int] = []
        staged_bytes = 0
        for number, nbytes in sources.on_host(elsewhere=True):
            if staged and staged_bytes + nbytes > STAGING_BYTES:
                self._write_part(writer, engine, sources, first, number, staged, progress)
                first, staged, staged_bytes = number, [], 0
            staged.append(number)
            staged_bytes += nbytes
        self._write_part(writer, engine, sources, first, len(sources), staged, progress)

    def _write_part(
        self,
        writer: _core.Writer,
        engine: _core.CudaEngine | None,
        sources: _core.Sources,
        first: int,
        end: int,
        staged: list[int],
        progress: Progress,
    ) -> None:
        copies = copy_elsewhere(self, sources, staged)
        writer.write_sources(engine, sources, first, end, progress.native())
        progress.advance(sources.nbytes(first, end))
        del copies


def copy_elsewhere(
    storages: StorageWriter, sources: _core.Sources, numbers: Sequence[int]
) -> list[torch.UntypedStorage]:
    """Copy storages of other devices to host memory. Return the copies, which the caller must keep."""
    copies = [storage.cpu() for storage in storages.native.get(numbers)]
    sources.put([(n, copy.data_ptr()) for n, copy in zip(numbers, copies, strict=True)])
    return copies


def write_sources(
    writer: _core.Writer,
    engine: _core.CudaEngine | None,
    sources: _core.Sources,
    progress: Progress,
    check: Callable[[], None],
    ahead: int,
) -> None:
    """Pass values to the native writer, wherever they are. An exception from ``check`` stops it.
    ``ahead``: bytes of encoded values from CUDA devices that may wait to be written.
    """
    report = progress.native()

    def watch(done: int) -> None:
        check()
        if report is not None:
            report(done)

    writer.write_sources(engine, sources, 0, len(sources), watch, ahead)
    progress.advance(sources.nbytes())


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
        self._empty = torch.empty
        self._map_location = map_location
        # The functions below must not keep this reader, and so all storages, alive: a cycle would
        # be left.
        self._raised = _Raised()
        self._on_signal = signal_code()
        self._restore = _restoring(map_location, self._raised)
        is_device = isinstance(map_location, (str, torch.device))
        self._where = torch.device(map_location) if is_device else None
        self._meta = self._where is not None and self._where.type == "meta"
        self._infos = infos
        self._ahead: dict[int, torch.UntypedStorage] = {}
        self._done: dict[int, torch.UntypedStorage] = {}
        self._sizes: dict[int, int] = {}
        # A function may do anything with a storage, so it gets storages whose values were read.
        self._devices: dict[str, torch.device | None] | None = (
            None if callable(map_location) else {}
        )
        self._waiting: list[tuple[int, torch.UntypedStorage]] | None = None
        # Whether `new_tensor` may create tensors; `None` until the first call.
        self._makes: bool | None = None
        self._background: _Background | None = None
        # With how many waiting storages a batch begins; and the storages that are read together at
        # the end.
        self._batch = 0
        self._together: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self._infos)

    def info(self, number: int) -> _core.TensorInfo:
        """Name, dtype, shape and bytes of a storage, as the file has them."""
        if not 0 <= number < len(self._infos):
            raise CorruptDataError(f"the object refers to tensor {number}, but the file has {len(self._infos)} tensors")
        return self._infos[number]

    def is_of_caller(self, error: BaseException) -> bool:
        """Whether a function of the caller's raised an exception, or a signal handler."""
        return error is self._raised.error or is_of_signal(error, self._on_signal)

    def get(self, number: int, location: str) -> torch.UntypedStorage:
        """The storage with this index, on the device that its tag and ``map_location`` select."""
        storage = self._done.get(number)
        if storage is None:
            storage = self._done[number] = self._place(number, location)
            self._sizes[number] = storage.nbytes()
        return storage

    def new_tensor(
        self, number: int, dtype: torch.dtype, shape: tuple[int, ...], location: str
    ) -> torch.Tensor | None:
        """A new tensor that covers a whole storage, to be filled later, or ``None`` if `get` would not
        place the storage like that.
        """
        if self._makes is None:
            self._makes = self._makes_tensors()
        if not self._makes or number in self._done:
            return None
        device = self._where if self._meta else self._device_of(location)
        if device is None:
            return None
        try:
            tensor = self._empty(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            if self.is_of_caller(error):
                raise
            return None  # `get` will report the error.
        storage, nbytes = tensor.untyped_storage(), self._infos[number][3]
        if self._waiting is None or storage.nbytes() != nbytes:
            return None
        self._done[number], self._sizes[number] = storage, nbytes
        if not self._meta:
            self._await(number, storage)
        return tensor

    def _makes_tensors(self) -> bool:
        """Whether storages can be created as part of new tensors."""
        import torch

        # With deterministic algorithms PyTorch would fill new tensors with a value.
        return not (
            self._waiting is None
            or self._ahead
            or self._fake
            or self._tls.skip_data
            or torch.are_deterministic_algorithms_enabled()
        )

    def on_fake_device(self, tensor: torch.Tensor, location: str) -> torch.Tensor:
        """Return the tensor; under a `FakeTensorMode` it notes the device that it would be on."""
        if self._fake:
            import torch

            where = self._map_location
            if isinstance(where, dict):
                where = where.get(location, location)
            elif callable(where):
                raise RuntimeError(
                    "a callable map_location is not supported in a FakeTensorMode"
                )
            tensor.fake_device = torch.device(location if where is None else where)
        return tensor

    def check_sizes(self) -> None:
        """Raise if a view made PyTorch enlarge a storage, which exposes uninitialised memory."""
        for number, storage in self._done.items():
            if storage.nbytes() > self._sizes[number]:
                name, _, _, nbytes = self.info(number)
                raise CorruptDataError(f"a view of `{name}` extends beyond its {nbytes} bytes")

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
            self._await(number, storage)
            return storage
        if number not in self._ahead:
            self._fetch(number, device or torch.device("cpu"))
        storage = self._ahead.pop(number)
        if storage.device == device:
            return storage
        # The storage that was read ahead belongs elsewhere.
        return self._restore(storage.cpu(), location)

    def _device_of(self, location: str) -> torch.device | None:
        """The device of a location tag, if storages can be read straight into its memory."""
        import torch

        if self._devices is None:
            return None
        if location not in self._devices:
            # PyTorch decides which device it is, or reports what is wrong with it.
            device = self._restore(torch.UntypedStorage(0), location).device
            on_gpu = device.type == "cuda" and self._compute.engine((device.index,)) is not None
            self._devices[location] = device if on_gpu or device.type == "cpu" else None
        return self._devices[location]

    def defer(self) -> None:
        """From now on storages are filled later: by `fill`, or, if there are many, in the background.
        Until `fill` has returned nobody may use their values. `close` must be called at the end.
        """
        self._waiting = []
        # The caller's progress function is called on the caller's thread.
        together = None
        if len(self._infos) >= MANY and not self._meta and self._progress.native() is None:
            together = self._reader.read_together()
        if together is not None:
            self._together = frozenset(together)
            self._background = _Background()
            self._batch = max(MANY // 2, len(self._infos) // BATCHES)

    def fill(self) -> None:
        """Read the storages that were handed out since `defer`."""
        waiting, self._waiting = self._waiting or [], None
        if self._background is not None:
            self._background.wait()
        self._read(waiting)

    def close(self) -> None:
        """Stop reading in the background."""
        if self._background is not None:
            self._background.close()

    def _await(self, number: int, storage: torch.UntypedStorage) -> None:
        """Note a storage that is to be filled."""
        assert self._waiting is not None
        self._waiting.append((number, storage))
        if self._background is not None and len(self._waiting) >= self._batch:
            now = [w for w in self._waiting if w[0] not in self._together]
            self._waiting = [w for w in self._waiting if w[0] in self._together]
            self._batch += len(self._waiting)
            # The current streams are those of this thread.
            self._background.read(self._reader, self._compute, self._requests(now), now)

    def numbers(self) -> dict[int, int]:
        """The indices of the storages that were handed out, by identity."""
        return {storage._cdata: number for number, storage in self._done.items()}

    def _fetch(self, first: int, device: torch.device) -> None:
        """Read a storage and those that will be asked for next: a batch is read in parallel."""
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
        requests = self._requests(batch)
        read_batch(self._reader, self._compute, requests, self._progress, new=True)

    def _requests(self, batch: list[tuple[int, torch.UntypedStorage]]) -> list[_core.PlacedRequest]:
        places = Places()
        return [(n, s.data_ptr(), s.nbytes(), places.of(s)) for n, s in batch if s.nbytes()]


class _Raised:
    """The exception that a function of the caller's raised."""

    def __init__(self) -> None:
        self.error: Exception | None = None


def _guarded(map_location: Any, raised: _Raised) -> Any:
    import torch

    if map_location is None or isinstance(map_location, (str, torch.device, dict)):
        return map_location
    if not callable(map_location):
        kinds = "expected None, a device, a dict or a callable"
        raise TypeError(f"map_location={map_location!r}: {kinds}")
    kinds_of_storage = (torch.UntypedStorage, torch.TypedStorage)

    def call(storage: Any, location: str) -> Any:
        try:
            result = map_location(storage, location)
            if result is not None and not isinstance(result, kinds_of_storage):
                raise TypeError(f"map_location returned {result!r}: expected a storage or None")
            return result
        except Exception as error:
            raised.error = error
            raise

    return call


def _restoring(map_location: Any, raised: _Raised) -> Callable[[Any, str], Any]:
    """PyTorch's function that moves a storage to its place."""
    import torch

    restore: Callable[[Any, str], Any] = torch.serialization._get_restore_location(
        _guarded(map_location, raised)
    )
    if not isinstance(map_location, dict):
        return restore

    def call(storage: Any, location: str) -> Any:
        try:
            return restore(storage, location)
        except Exception as error:
            # An error for a tag in the dict is the caller's; other tags come from the file.
            if location in map_location:
                raised.error = error
            raise

    return call


#: Listed once, for speed, and without the functions of `signal` itself, which make each number and
#: handler a member of an enumeration.
_SIGNALS = tuple(map(int, signal.valid_signals()))
_handler_of: Callable[[int], Any] = _signal.getsignal


def signal_code() -> list[CodeType]:
    """The code of the Python functions that handle signals."""
    codes = []
    for number in _SIGNALS:
        handler = _handler_of(number)
        if callable(handler):
            # A function or method, a `functools.partial` of one, or an object with `__call__`.
            for function in (handler, getattr(handler, "func", None), type(handler).__call__):
                code = getattr(function, "__code__", None)
                if isinstance(code, CodeType):
                    codes.append(code)
                    break
    return codes


def is_of_signal(error: BaseException, codes: Sequence[CodeType] = ()) -> bool:
    """Whether a signal handler raised an exception. ``codes``: what `signal_code` returned before:
    a handler may have put another one in its place.
    """
    known = {id(code) for code in (*codes, *signal_code())}
    at = error.__traceback__
    while at is not None:
        if id(at.tb_frame.f_code) in known:
            return True
        at = at.tb_next
    return False


class _Background(Progress):
    """Reads batches of storages, one after the other, on a thread that ends with it."""

    def __init__(self) -> None:
        super().__init__(None, 0, "load")
        self._thread = ThreadPoolExecutor(1, "s4weights-read")
        self._started: list[Future[None]] = []
        self._closed = False

    def read(
        self,
        reader: _core.Reader,
        compute: Compute,
        batch: list[_core.PlacedRequest],
        storages: object,
    ) -> None:
        """Read a batch after those before it. Its storages live until then, even if an exception
        keeps everyone from waiting.
        """

        def work(_storages: object) -> None:
            read_batch(reader, compute, batch, self, new=True)

        try:
            self._started.append(self._thread.submit(work, storages))
        except RuntimeError:  # At exit no thread can be started any more.
            work(storages)

    def wait(self) -> None:
        """Wait for all batches. Raises the first error."""
        for started in self._started:
            started.result()

    def close(self) -> None:
        """End the thread, in the middle of a batch if nobody waited for it."""
        self._closed = True
        self._thread.shutdown(cancel_futures=True)

    def native(self) -> Callable[[int], None]:
        """The function that native work calls from time to time."""
        return self._check

    def _check(self, _done: int) -> None:
        if self._closed:
            raise S4Error("reading was stopped")


def read_batch(
    reader: _core.Reader,
    compute: Compute,
    batch: list[_core.PlacedRequest],
    progress: Progress,
    new: bool = False,
) -> None:
    """Read into memory of the host and of CUDA devices. ``new``: the host memory was not written to before."""
    there = [request for request in batch if request[3] != HOST]
    engine = compute.required({request[3][0] for request in there}) if there else None
    host = [request[:3] for request in batch if request[3] == HOST]
    if host:
        reader.read_into(host, progress.native(), new)
        progress.advance(sum(nbytes for _, _, nbytes in host))
    if engine is not None:
        reader.read_into_device(engine, there, progress.native())
        progress.advance(sum(request[2] for request in there))


def _allocate(nbytes: int, device: torch.device | None = None) -> torch.UntypedStorage:
    import torch

    if device is not None and device.type != "cpu":
        # If there is no room, PyTorch's own error says what takes it up.
        return torch.UntypedStorage(nbytes, device=device)
    try:
        return torch.UntypedStorage(nbytes)
    except RuntimeError as error:
        if is_of_signal(error):
            raise
        raise LimitError(f"not enough memory for a tensor of {nbytes} bytes: {error}") from error


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor consists of plain strided elements of a storage on the CPU or a GPU."""
    import torch

    return bool(
        tensor.layout is torch.strided
        and (tensor.is_cpu or tensor.is_cuda)
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor._is_zerotensor()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def require_storage(tensor: torch.Tensor, path: str) -> None:
    """Raise `S4Error` for a tensor whose storage was freed, as sharding libraries do: the file
    would not contain its values, and could not be loaded.
    """
    if not has_storage(tensor):
        raise S4Error(
            f"cannot save `{path}`: a tensor of shape {list(tensor.shape)} whose storage has "
            f"{tensor.untyped_storage().nbytes()} bytes; was it freed?"
        )


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether all elements of a strided tensor lie within its storage, which may have been freed or cut short."""
    nbytes, item = tensor.untyped_storage().nbytes(), tensor.element_size()
    return fits(nbytes, item, tensor.storage_offset(), tensor.shape, tensor.stride())


def fits(nbytes: int, item: int, offset: int, shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a view with this offset, shape and stride lies within a storage of ``nbytes``."""
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return 0 in shape or (last + 1) * item <= nbytes
