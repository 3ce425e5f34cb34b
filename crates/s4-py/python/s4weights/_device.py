"""Where encoding and decoding run: this process's CUDA engines, and arrays of other libraries."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from . import _core, _live
from ._errors import LimitError, S4Error

if TYPE_CHECKING:
    import torch

#: Bytes of device memory that an engine may use on each device while a call works: up to `SCARCE_SCRATCH` at most half
#: of what is free, beyond that at most an eighth.
GPU_SCRATCH, SCARCE_SCRATCH = 768 << 20, 256 << 20

#: Bytes of page-locked memory that encoded values may take, and share of the machine's memory: one in so many.
PINNED, PINNED_SHARE = 8 << 30, 8

#: Where values in host memory are: no device, no stream.
HOST = (-1, 0)

# An engine keeps pinned host memory and the kernels, which take longer to get than a save takes.
# One that a fork inherited is of no use to the child: hence the process's number.
_engines: dict[tuple[int, int], _core.CudaEngine] = {}
_lock = threading.Lock()
_warned = False
#: How often page-locked memory was given back.
_freed = 0


class Compute:
    """The arguments ``device=``, ``gpu_scratch=`` and ``pinned_memory=`` of one call.

    Raises `S4Error` at once if the device is to be a GPU and there is none that can be used.
    """

    def __init__(
        self, device: str, gpu_scratch: int | None, pinned_memory: int | None = None
    ) -> None:
        if device not in ("auto", "cuda", "cpu"):
            raise ValueError(f'device={device!r}: "auto", "cuda" or "cpu" expected')
        if gpu_scratch is not None and (type(gpu_scratch) is not int or gpu_scratch <= 0):
            raise ValueError(f"gpu_scratch={gpu_scratch!r}: a number of bytes expected")
        if pinned_memory is not None and (type(pinned_memory) is not int or pinned_memory < 0):
            raise ValueError(f"pinned_memory={pinned_memory!r}: a number of bytes expected")
        self._device, self._pinned = device, pinned_memory
        self._given = gpu_scratch is not None
        self.scratch = GPU_SCRATCH if gpu_scratch is None else gpu_scratch
        self._found: dict[frozenset[int], _core.CudaEngine | None] = {}
        if device == "cuda":
            self.engine(())

    def engine(self, ordinals: Iterable[int]) -> _core.CudaEngine | None:
        """The engine for these devices; ``None``: their values are to go through host memory."""
        if self._device == "cpu":
            return None
        key = frozenset(ordinals)
        if key not in self._found:
            self._found[key] = self._find(key)
        return self._found[key]

    def _find(self, ordinals: frozenset[int]) -> _core.CudaEngine | None:
        try:
            engine = _engine(self.scratch)
            if self._pinned is not None:
                engine.limit_frame_memory(self._pinned)
            for ordinal in sorted(ordinals):
                engine.open(ordinal)
            return engine
        except S4Error as error:
            if self._device == "cuda":
                raise type(error)(
                    f'device="cuda": {error}; with device="auto" tensors on a GPU are copied '
                    "through host memory"
                ) from error
            if self._given and isinstance(error, LimitError):
                raise
            _warn(error)
            return None


def _in_child() -> None:
    global _lock
    _lock = threading.Lock()


_live.at_fork(_in_child)


def _engine(scratch: int) -> _core.CudaEngine:
    key = (os.getpid(), scratch)
    with _lock:
        if key not in _engines:
            _engines[key] = _core.CudaEngine(scratch, _pinned())
        return _engines[key]


def _pinned() -> int:
    """Bytes of page-locked memory that encoded values may take unless the user says so."""
    try:
        return min(PINNED, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // PINNED_SHARE)
    except (AttributeError, OSError, ValueError):  # A system that does not tell.
        return PINNED


def free_pinned_memory() -> None:
    """Gives page-locked host memory that no save needs at the moment back to the system.

    Saves of tensors on CUDA devices keep it for the next one (``pinned_memory=``), since the system takes
    its time to lock pages.
    """
    global _freed
    _freed += 1
    # Without the lock: a signal handler may close a store wherever the main thread is.
    for (process, _), engine in list(_engines.items()):
        if process == os.getpid():
            engine.trim_frame_memory()


def prepare_pinned_memory(engine: _core.CudaEngine, nbytes: int) -> None:
    """Takes page-locked memory for as many encoded bytes as a save had, on a thread of its own: the next
    save does not wait for it.

    It ends early where the memory is not wanted any more, or the program ends.
    """
    freed, main = _freed, threading.main_thread()

    def grow() -> None:
        while freed == _freed and main.is_alive() and engine.grow_frame_memory(nbytes):
            pass
        if freed != _freed:  # What was taken last was not there to be given back.
            engine.trim_frame_memory()

    with contextlib.suppress(RuntimeError):  # No thread can be started any more.
        threading.Thread(target=grow, name="s4weights-pinned").start()


def _warn(error: S4Error) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"tensors on a GPU are copied through host memory: {error}", UserWarning, stacklevel=2
        )


class Places:
    """Where storages are, for one call: a device's current stream is looked up once."""

    def __init__(self) -> None:
        self._found: dict[torch.device, tuple[int, int]] = {}

    def of(self, storage: torch.UntypedStorage) -> tuple[int, int]:
        """The number of a storage's device and the handle of the stream that is current there."""
        device = storage.device
        found = self._found.get(device)
        if found is None:
            found = self._found[device] = self._find(device)
        return found

    def _find(self, device: torch.device) -> tuple[int, int]:
        import torch

        if device.type != "cuda":
            return HOST
        return device.index, torch.cuda.current_stream(device).cuda_stream


def current_streams(ordinals: Iterable[int]) -> dict[int, int]:
    """The handles of the streams that are current on CUDA devices, by their numbers."""
    import torch

    return {n: torch.cuda.current_stream(n).cuda_stream for n in ordinals}


def place(storage: torch.UntypedStorage) -> tuple[int, int]:
    """The number of a storage's device and the handle of the stream that is current there."""
    return Places().of(storage)


def is_array(obj: object) -> bool:
    """Whether an object is an array of another library that lends its memory by DLPack.

    NumPy's are not meant: they are pickled, and come back as what they were.
    """
    kind = type(obj)
    if not hasattr(kind, "__dlpack__") or not hasattr(kind, "__dlpack_device__"):
        return False
    theirs = [(sys.modules.get("torch"), "Tensor"), (sys.modules.get("numpy"), "ndarray")]
    return not any(module and issubclass(kind, getattr(module, name)) for module, name in theirs)


def as_tensor(obj: Any) -> torch.Tensor | None:
    """A tensor in the memory of such an array; ``None`` if PyTorch cannot take it as it is."""
    import torch

    try:
        return torch.from_dlpack(obj)
    except (BufferError, RuntimeError, TypeError, ValueError, AttributeError):
        return None
