"""Where to encode and decode: this process's CUDA engines; and arrays of other libraries."""

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

#: Bytes of memory that an engine may use on each device during a call. The first `SCARCE_SCRATCH`
#: bytes may be up to half of what is free, more than that at most an eighth.
GPU_SCRATCH, SCARCE_SCRATCH = 768 << 20, 256 << 20

#: The default limit for page-locked memory, in bytes, and as a fraction of the machine's memory
#: (the denominator).
PINNED, PINNED_SHARE = 8 << 30, 8

#: The place of values in host memory: no device, no stream.
HOST = (-1, 0)

# Engines keep pinned host memory and kernels, which take longer to set up than a save takes. An
# engine inherited through a fork cannot be used in the child, so the key has the process id.
# A call that a progress function or signal handler makes must not wait for the call that it interrupts, so it has an
# engine of its own: the last part of the key is how deeply calls are nested.
_engines: dict[tuple[int, int, int], _core.CudaEngine] = {}
# A signal handler may need an engine while the main thread makes one.
_lock = threading.RLock()
_warned = False
#: The number of calls of `free_pinned_memory` so far.
_freed = 0


class Compute:
    """The arguments ``device=``, ``gpu_scratch=`` and ``pinned_memory=`` of one call.

    Raises `S4Error` immediately if ``device="cuda"`` and no GPU can be used.
    """

    def __init__(
        self, device: str, gpu_scratch: int | None, pinned_memory: int | None = None
    ) -> None:
        if device not in ("auto", "cuda", "cpu"):
            raise ValueError(f'device={device!r}: expected "auto", "cuda" or "cpu"')
        if gpu_scratch is not None and (type(gpu_scratch) is not int or gpu_scratch <= 0):
            raise ValueError(f"gpu_scratch={gpu_scratch!r}: expected a number of bytes")
        if pinned_memory is not None and (type(pinned_memory) is not int or pinned_memory < 0):
            raise ValueError(f"pinned_memory={pinned_memory!r}: expected a number of bytes")
        self._device, self._pinned = device, pinned_memory
        self._given = gpu_scratch is not None
        # Engines are kept until the process ends: a program that computes its own figure for each
        # call must not get one each time.
        self.scratch = GPU_SCRATCH if gpu_scratch is None else 1 << (gpu_scratch.bit_length() - 1)
        self._found: dict[tuple[int, frozenset[int]], _core.CudaEngine | None] = {}
        if device == "cuda":
            self.engine(())

    def engine(self, ordinals: Iterable[int]) -> _core.CudaEngine | None:
        """Return the engine for these devices, or ``None`` if their values must go through host memory."""
        if self._device == "cpu":
            return None
        key = _core.nesting(), frozenset(ordinals)
        if key not in self._found:
            self._found[key] = self._find(key[1])
        return self._found[key]

    def required(self, ordinals: Iterable[int]) -> _core.CudaEngine:
        """Like `engine`, for values that cannot go through host memory: raises `S4Error` then."""
        numbers = sorted(ordinals)
        engine = self.engine(numbers)
        if engine is None:
            names = ", ".join(f"cuda:{number}" for number in numbers)
            raise S4Error(f"cannot fill tensors on {names}: the CUDA engine could not be set up")
        return engine

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
                    f'device="cuda": {error}; use device="auto" to copy tensors on a GPU '
                    "through host memory"
                ) from error
            if self._given and isinstance(error, LimitError):
                raise
            _warn(error)
            return None


def _in_child() -> None:
    global _lock
    _lock = threading.RLock()


_live.at_fork(_in_child)


def _engine(scratch: int) -> _core.CudaEngine:
    key = (os.getpid(), scratch, _core.nesting())
    with _lock:
        made = _engines.get(key) or _core.CudaEngine(scratch, _pinned())
        return _engines.setdefault(key, made)


def _pinned() -> int:
    """Return the default limit for page-locked memory, in bytes."""
    try:
        return min(PINNED, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // PINNED_SHARE)
    except (AttributeError, OSError, ValueError):  # The system does not say how much it has.
        return PINNED


def free_pinned_memory() -> None:
    """Return to the system the page-locked host memory that no save is using.

    Saves of tensors on CUDA devices keep this memory for the next save (see ``pinned_memory=``),
    because locking pages is slow.
    """
    global _freed
    _freed += 1
    # Without the lock: a signal handler may close a store at any point of the main thread.
    for key, engine in list(_engines.items()):
        if key[0] == os.getpid():
            engine.trim_frame_memory()


def prepare_pinned_memory(engine: _core.CudaEngine, nbytes: int) -> None:
    """Allocate page-locked memory for as many encoded bytes as the last save had, on a separate
    thread, so that the next save does not wait for it.

    The thread stops early if the memory is freed in the meantime or the program ends.
    """
    freed, main = _freed, threading.main_thread()

    def grow() -> None:
        while freed == _freed and main.is_alive() and engine.grow_frame_memory(nbytes):
            pass
        if freed != _freed:  # `free_pinned_memory` may have missed the last piece.
            engine.trim_frame_memory()

    with contextlib.suppress(RuntimeError):  # At exit no thread can be started any more.
        threading.Thread(target=grow, name="s4weights-pinned").start()


def _warn(error: S4Error) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"tensors on a GPU will be copied through host memory: {error}", UserWarning, stacklevel=2
        )


class Places:
    """The places of storages, for one call: a device's current stream is looked up once."""

    def __init__(self) -> None:
        self._found: dict[torch.device, tuple[int, int]] = {}

    def of(self, storage: torch.UntypedStorage) -> tuple[int, int]:
        """The ordinal of a storage's device, and the handle of that device's current stream."""
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
    """The handles of the current streams of CUDA devices, by ordinal."""
    import torch

    return {n: torch.cuda.current_stream(n).cuda_stream for n in ordinals}


def place(storage: torch.UntypedStorage) -> tuple[int, int]:
    """The ordinal of a storage's device, and the handle of that device's current stream."""
    return Places().of(storage)


def is_array(obj: object) -> bool:
    """Whether an object is an array of another library that lends its memory through DLPack.

    NumPy arrays do not count: they are pickled, so that they are loaded as NumPy arrays.
    """
    kind = type(obj)
    if not hasattr(kind, "__dlpack__") or not hasattr(kind, "__dlpack_device__"):
        return False
    theirs = [(sys.modules.get("torch"), "Tensor"), (sys.modules.get("numpy"), "ndarray")]
    return not any(module and issubclass(kind, getattr(module, name)) for module, name in theirs)


def as_tensor(obj: Any) -> torch.Tensor | None:
    """A tensor that shares the memory of such an array, or ``None`` if PyTorch cannot make one."""
    import torch

    try:
        return torch.from_dlpack(obj)
    except (BufferError, RuntimeError, TypeError, ValueError, AttributeError):
        return None
