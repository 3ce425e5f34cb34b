"""Lossless compression of PyTorch training checkpoints.

`save` and `load` replace `torch.save` and `torch.load`::

    import s4weights

    s4weights.save({"model": model.state_dict(), "step": step}, "step100.s4w")
    checkpoint = s4weights.load("step100.s4w", map_location="cuda")

`CheckpointStore` stores the checkpoints of a run, most of them as small deltas of an earlier one::

    with s4weights.CheckpointStore("runs/a") as store:
        store.save_checkpoint({"model": model.state_dict()}, step, blocking=False)
        ...
        checkpoint = store.load_checkpoint()

`open` reads individual tensors, or parts of them, from a file. `s4weights.numpy` saves, loads and
opens files with NumPy arrays, without PyTorch. `patch` makes unmodified programs that call
`torch.save` and `torch.load` use ``.s4w`` files.

Tensors on CUDA devices are encoded and decoded on the device. `load_into` fills existing tensors
in place. `verify` checks a file without PyTorch, and `inspect` shows what is in it.

All functions and store methods may be called from several threads at the same time; the caller must
protect their arguments (tensors, streams). Ctrl-C interrupts any call within a second. Warnings go
to the logger ``s4weights`` and its children, such as ``s4weights.store``. If `logging` is not set
up, they are printed on stderr.
"""

from __future__ import annotations

from ._core import __version__
from ._device import free_pinned_memory
from ._entries import CheckpointEntry, Retention
from ._errors import (
    ConflictError,
    CorruptDataError,
    LimitError,
    MismatchError,
    NotFoundError,
    S4Error,
    StorageError,
    UnsafeLoadError,
    UnsupportedFormatError,
)
from ._load import get_unsafe_globals, inspect, load, verify
from ._load_into import load_into
from ._once import load_checkpoint, save_checkpoint
from ._open import open
from ._patch import patch, unpatch
from ._pending import PendingFile, PendingSave, finish_on_sigterm
from ._report import Report, add_reporter
from ._runner import RunnerClient, RunnerSave
from ._save import save
from ._store import CheckpointStore

__all__ = [
    "CheckpointEntry",
    "CheckpointStore",
    "ConflictError",
    "CorruptDataError",
    "LimitError",
    "MismatchError",
    "NotFoundError",
    "PendingFile",
    "PendingSave",
    "Report",
    "Retention",
    "RunnerClient",
    "RunnerSave",
    "S4Error",
    "StorageError",
    "UnsafeLoadError",
    "UnsupportedFormatError",
    "__version__",
    "add_reporter",
    "finish_on_sigterm",
    "free_pinned_memory",
    "get_unsafe_globals",
    "inspect",
    "load",
    "load_checkpoint",
    "load_into",
    "open",
    "patch",
    "save",
    "save_checkpoint",
    "unpatch",
    "verify",
]
