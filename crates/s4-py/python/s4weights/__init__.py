"""Lossless compression of PyTorch training checkpoints.

`save` and `load` stand in for `torch.save` and `torch.load`::

    import s4weights

    s4weights.save({"model": model.state_dict(), "step": step}, "step100.s4w")
    checkpoint = s4weights.load("step100.s4w", map_location="cuda")

`CheckpointStore` keeps many checkpoints of a run, most as small deltas of an earlier one::

    with s4weights.CheckpointStore("runs/a") as store:
        store.save_checkpoint({"model": model.state_dict()}, step, blocking=False)
        ...
        checkpoint = store.load_checkpoint()

`open` reads single tensors of a file, and parts of them. `s4weights.numpy` does all this with arrays of
NumPy, without PyTorch. `patch` has programs that call
`torch.save` and `torch.load` use ``.s4w`` files as they are.

Tensors on CUDA devices are encoded and decoded where they are. `load_into` fills tensors that are
there already. `verify` checks a file without PyTorch, and `inspect` shows what is in it.

All functions may be called from several threads at once, and so may the methods of a store;
their arguments (tensors, streams) are the caller's to protect. Ctrl-C interrupts any call within
a second.
Warnings go to the logger ``s4weights`` and those below it, such as ``s4weights.store``; a program
that has not set up `logging` sees them on stderr.
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
