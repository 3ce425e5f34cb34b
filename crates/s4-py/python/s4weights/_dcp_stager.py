"""A stager for `torch.distributed.checkpoint.async_save`, built on background saves' staging."""

from __future__ import annotations

import copy
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from . import _core
from ._device import Compute
from ._errors import S4Error, UnsupportedFormatError
from ._names import walk_tensors
from ._pending import HostBuffer
from ._sources import check_threads
from ._staging import Budget, copy_on_devices
from ._storages import Hint, StorageWriter, has_storage, is_of_signal, is_strided
from ._unsavable import odd_kind, valueless_kind

#: The most buffers that are kept for later calls.
_SPARE = 2

#: Device memory that holds copies, by its address. Whoever reads the copies waits for them first,
#: and frees them afterwards.
_device_copies: weakref.WeakValueDictionary[int, _DeviceBytes] = weakref.WeakValueDictionary()


class _DeviceBytes:
    """Device memory that holds copies, in the form in which PyTorch can wrap it."""

    def __init__(self, copies: _core.DeviceCopies, address: int, nbytes: int) -> None:
        self.copies = copies
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


class _SharedBuffers:
    """Host memory that is shared with other processes, in one storage per copied storage: PyTorch
    2.15 crashes when it pickles two DTensors that share a storage.
    """

    def __init__(self, threads: int | None) -> None:
        self._threads = threads
        self._kept: list[torch.UntypedStorage] = []

    def parts(self, storages: Sequence[torch.UntypedStorage]) -> list[tuple[torch.Tensor, int]]:
        """Copy storages; return, for each, the memory of its copy, and the copy's offset."""
        # The storages of the last state are reused where the size is the same.
        kept = dict(enumerate(self._kept))
        self._kept, found, host = [], [], []
        for number, storage in enumerate(storages):
            have, size = kept.pop(number, None), storage.nbytes()
            if have is None or have.nbytes() != size:
                have = torch.UntypedStorage._new_shared(size)
            self._kept.append(have)
            found.append((torch.empty(0, dtype=torch.uint8, device="cpu").set_(have), 0))
            if storage.device.type == "cpu":
                host.append((have.data_ptr(), storage.data_ptr(), size))
            else:
                have.copy_(storage, non_blocking=False)
        _core.copy_memory([item for item in host if item[2]], self._threads)
        return found

    def free(self) -> None:
        """Give the memory back."""
        self._kept = []


#: Classes of tensors whose copies are plain tensors.
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
#: Types whose values are never copied.
_ATOMIC = (type(None), bool, int, float, complex, str, bytes)


class _Copied(NamedTuple):
    """The copy of a storage: the bytes of ``memory`` from ``start`` on."""

    memory: torch.Tensor
    start: int


class _StagedState(dict[str, Any]):
    """The result of `Stager.stage`. DCP holds it for as long as the save runs."""

    __slots__ = ("__weakref__",)


class Stager(AsyncStager):  # type: ignore[misc]
    """Preserves the state that `dcp.async_save` is called with while the save runs::

        stager = s4weights.dcp.Stager()
        future = dcp.async_save(state, storage_writer=writer, async_stager=stager)

    Tensors on CUDA devices are copied on the device if there is room (docs/staging.md), and the
    copies are freed as soon as `StorageWriter` has encoded them. Without room they are copied to
    host memory, as host tensors are. That memory is kept for the next save; it is page-locked if it
    holds device values. Values that are not tensors are copied as by `copy.deepcopy`. `stage`
    returns when copies in host memory are complete, and those on devices are queued on the current
    streams. Use one stager for all saves of a process.

    With copies on devices the writer must be a `StorageWriter`.

    Args:
        shared_memory: copy everything to host memory that is shared with another process, for saves
            by that process (``AsyncCheckpointerType.PROCESS``).
        threads: number of threads that copy host memory. ``None`` means one per core.
        device: ``"cpu"`` disables copies on devices.
        gpu_scratch: as in `save`.
        device_reserve: as in `CheckpointStore`.
    """

    # All copies are complete, or queued, when `stage` returns.
    _synchronize_after_execute = False

    def __init__(
        self,
        *,
        shared_memory: bool = False,
        threads: int | None = None,
        device: str = "auto",
        gpu_scratch: int | None = None,
        device_reserve: int | None = None,
    ) -> None:
        check_threads(threads)
        self._shared, self._threads = shared_memory, threads
        self._compute: Callable[[], Compute] = lambda: Compute(device, gpu_scratch)
        self._budget = Budget(None, device_reserve, self._compute().scratch).check()
        self._lock = threading.Lock()
        self._spare: list[HostBuffer | _SharedBuffers] = []
        self._closed = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a state.

        Raises:
            LimitError, RuntimeError, MemoryError: there is not enough memory. Nothing was started.
            ValueError: the stager is closed.
            S4Error: the memory of a tensor has been freed.
        """
        if self._closed:
            raise ValueError("the stager is closed")
        found = _Found()
        try:
            found.collect(state_dict)
        except Exception as error:
            if (named := _named(state_dict, error)) is not error:
                raise named from error
            raise
        if found.freed is not None:
            paths = (path for path, tensor in walk_tensors(state_dict) if tensor is found.freed)
            what = next(paths, "a part of a tensor")
            raise S4Error(f"cannot save `{what}`: its storage is too small; was it freed?")
        buffer = self._take()
        try:
            with torch.no_grad():
                copies = self._copy(found.storages, buffer)
                staged = _StagedState(_Copier(copies, found).copy(state_dict))
        except BaseException as error:
            # A GPU may still be writing to this memory, so it is not used again.
            buffer.free()
            if isinstance(error, Exception) and (named := _named(state_dict, error)) is not error:
                raise named from error
            raise
        weakref.finalize(staged, self._give_back, buffer).atexit = False
        return staged

    def close(self) -> None:
        """Free the memory that is not in use by a save. The rest is freed when the saves end."""
        with self._lock:
            self._closed = True
            spare, self._spare = self._spare, []
        for buffer in spare:
            buffer.free()

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` leaves no work to wait for."""

    def _take(self) -> HostBuffer | _SharedBuffers:
        with self._lock:
            if self._spare:
                return self._spare.pop()
        return _SharedBuffers(self._threads) if self._shared else HostBuffer(self._threads)

    def _give_back(self, buffer: HostBuffer | _SharedBuffers) -> None:
        with self._lock:
            if not self._closed and len(self._spare) < _SPARE:
                self._spare.append(buffer)

    def _copy(
        self, storages: StorageWriter, buffer: HostBuffer | _SharedBuffers
    ) -> dict[int, _Copied]:
        """Copy storages; return where the copies are, by the storage's identity."""
        copies: dict[int, _Copied] = {}
        if not self._shared:
            copies = self._copy_on_devices(storages)
        rest = [s for s in storages.all() if s._cdata not in copies]
        for storage, (memory, start) in zip(rest, buffer.parts(rest), strict=True):
            copies[storage._cdata] = _Copied(memory, start)
        return copies

    def _copy_on_devices(self, storages: StorageWriter) -> dict[int, _Copied]:
        engine = storages.engine(self._compute())
        sources = storages.sources(engine)
        ordinals = storages.native.devices()
        on_devices = copy_on_devices(sources, engine, ordinals, "auto", self._budget)
        if on_devices is None:
            return {}
        there = [s for s in storages.all() if s.device.type == "cuda" and s.nbytes()]
        placed = [(s, at, n) for s, (at, (n, _)) in zip(there, on_devices.places(), strict=True)]
        copies = {}
        for ordinal in ordinals:
            # The copies on a device lie in one mapping. PyTorch wraps it once, and each copy is a
            # part of it.
            own = [(storage, at) for storage, at, n in placed if n == ordinal]
            first = min(at for _, at in own)
            end = max(at + storage.nbytes() for storage, at in own)
            held = _DeviceBytes(on_devices, first, end - first)
            _device_copies[first] = held
            whole = torch.as_tensor(held, device=f"cuda:{ordinal}")
            for storage, at in own:
                copies[storage._cdata] = _Copied(whole, at - first)
        return copies


def device_copies(tensors: Iterable[torch.Tensor]) -> list[_core.DeviceCopies]:
    """The device copies that tensors lie in. They must be waited for before they are read."""
    found: dict[int, _core.DeviceCopies] = {}
    for tensor in tensors:
        if tensor.device.type == "cuda" and tensor.numel():
            held = _device_copies.get(tensor.untyped_storage().data_ptr())
            if held is not None:
                found[id(held.copies)] = held.copies
    return [*found.values()]


def _inner(tensor: torch.Tensor) -> tuple[Sequence[str], Any] | None:
    """For a tensor that wraps others, such as a DTensor: the names of the wrapped tensors, and its
    context. ``None`` for other tensors.
    """
    if type(tensor) in _PLAIN:
        return None
    if type(tensor) is DTensor:
        return ("_local_tensor",), tensor._spec
    if not hasattr(tensor, "__tensor_flatten__"):
        return None
    names, context = tensor.__tensor_flatten__()
    return names, context


def _wrap(tensor: torch.Tensor, parts: dict[str, Any], context: Any) -> torch.Tensor:
    """A wrapper like ``tensor``, around other parts."""
    if type(tensor) is DTensor:
        # `__tensor_unflatten__` would build the same spec again, which takes most of its time.
        return DTensor(parts["_local_tensor"], context, requires_grad=tensor.requires_grad)
    made: torch.Tensor = type(tensor).__tensor_unflatten__(
        parts, context, tensor.size(), tensor.stride()
    )
    return made


def _items(obj: Any) -> Iterable[Any] | None:
    """The items of a container of a state, or ``None`` if it is not one."""
    if isinstance(obj, dict):
        return obj.values()
    if type(obj) in (list, tuple) or _is_named(obj):
        return obj  # type: ignore[no-any-return]
    return None


def _is_named(obj: Any) -> bool:
    return isinstance(obj, tuple) and hasattr(obj, "_fields")


def _named(state: Any, error: Exception) -> Exception:
    """The error, or one with the name of the tensor that cannot be copied, if that is why it occurred."""
    if isinstance(error, (S4Error, MemoryError, torch.OutOfMemoryError)) or is_of_signal(error):
        return error
    for path, tensor in walk_tensors(state, whole=True):
        why = f"a {type(tensor).__name__} that cannot be copied"
        try:
            odd = odd_kind(tensor)
            why = odd or why
            if odd is not None and valueless_kind(tensor):
                return UnsupportedFormatError(f"cannot save `{path}`: {why}")
            # All tensors of a sharded model may be DTensors: they are not copied just to find that they can be.
            if odd is None and type(tensor) in (*_PLAIN, DTensor):
                continue
            if is_strided(tensor) and _inner(tensor) is None:
                tensor.untyped_storage().data_ptr()
            found = _Found()
            found.collect(tensor)
            _Copier({}, found).copy(tensor)
        except Exception as again:
            if is_of_signal(again):
                raise
            if type(again) is type(error) and str(again) == str(error):
                return UnsupportedFormatError(f"cannot save `{path}`: {why}")
    return error


class _Found:
    """The tensors of a state, and their storages."""

    def __init__(self) -> None:
        self.storages = StorageWriter()
        self.tensors: list[torch.Tensor] = []
        #: Strided tensors, including wrapped ones, with their storages' identity; by identity.
        self.strided: dict[int, tuple[torch.Tensor, int]] = {}
        #: A tensor whose storage was freed: the copies of others would lie where its values should.
        self.freed: torch.Tensor | None = None

    def collect(self, obj: Any) -> None:
        if isinstance(obj, torch.Tensor):
            self.tensors.append(obj)
            self._number(obj)
            return
        for item in _items(obj) or ():
            self.collect(item)

    def _number(self, tensor: torch.Tensor) -> None:
        inner = _inner(tensor)
        if inner is not None:
            for name in inner[0]:
                part = getattr(tensor, name)
                if isinstance(part, torch.Tensor):
                    self._number(part)
        elif is_strided(tensor):
            storage = tensor.untyped_storage()
            if not has_storage(tensor):
                self.freed = tensor
            self.storages.number(storage, _as_bytes)
            self.strided[id(tensor)] = tensor, storage._cdata


def _as_bytes() -> Hint:
    return Hint("", torch.uint8, None)


class _Copier:
    """Rebuilds a state on the copies of its storages, which are given by identity."""

    def __init__(self, copies: dict[int, _Copied], found: _Found) -> None:
        self._copies, self._tensors, self._strided = copies, found.tensors, found.strided
        # The memo of `copy.deepcopy`: copies by the identity of the original.
        self._memo: dict[int, Any] = {}
        # Memory that holds copies, as elements of a dtype.
        self._elements: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def copy(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            made = self._memo.get(id(obj))
            if made is None:
                made = self._memo[id(obj)] = self._tensor(obj)
                # Such as a shard's position: `torch.distributed.checkpoint.CheckpointableTensor`.
                for name, value in obj.__dict__.items():
                    heavy = callable(value) or isinstance(value, torch.Tensor)
                    if not heavy and name not in made.__dict__:
                        made.__dict__[name] = self.copy(value)
            return made
        if type(obj) in _ATOMIC:
            return obj
        items = _items(obj)
        if items is None or (isinstance(obj, dict) and type(obj) not in (dict, OrderedDict)):
            # It may refer to tensors of the state. They are copied first, so that `deepcopy` finds
            # their copies in the memo.
            while self._tensors:
                self.copy(self._tensors.pop())
            for _, tensor in walk_tensors(obj):
                self.copy(tensor)
            return copy.deepcopy(obj, self._memo)
        if isinstance(obj, dict):
            return type(obj)((key, self.copy(value)) for key, value in obj.items())
        made = [self.copy(item) for item in items]
        return type(obj)(*made) if _is_named(obj) else type(obj)(made)

    def _part(self, part: Any) -> Any:
        # Not every part that a wrapper names is a tensor: a DTensor names its mesh, too.
        return self._tensor(part) if isinstance(part, torch.Tensor) else part

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        inner = _inner(tensor)
        if inner is not None:
            names, context = inner
            parts = {name: self._part(getattr(tensor, name)) for name in names}
            return _wrap(tensor, parts, context)
        made = self._plain(tensor)
        kind = type(tensor)
        return made if kind in _PLAIN else made.as_subclass(kind)

    def _plain(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self._strided.get(id(tensor))
        if known is None and is_strided(tensor):
            # A wrapper created it only now, when it was asked for its parts.
            known = tensor, tensor.untyped_storage()._cdata
        copied = None if known is None else self._copies.get(known[1])
        if copied is None:
            return copy.deepcopy(tensor.detach(), self._memo)
        elements = self._as(copied.memory, tensor.dtype)
        first = copied.start // tensor.itemsize + tensor.storage_offset()
        made = elements.as_strided(
            tensor.size(), tensor.stride(), elements.storage_offset() + first
        )
        made = torch._conj(made) if tensor.is_conj() else made
        return torch._neg_view(made) if tensor.is_neg() else made

    def _as(self, memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Memory as elements of a dtype; copies are parts of it."""
        key = (id(memory), dtype)
        if key not in self._elements:
            whole = torch.empty(0, dtype=dtype, device=memory.device)
            start, count = (
                memory.storage_offset() // dtype.itemsize,
                memory.nbytes // dtype.itemsize,
            )
            self._elements[key] = whole.set_(memory.untyped_storage(), start, (count,), (1,))
        return self._elements[key]
