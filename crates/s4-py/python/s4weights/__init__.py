"""Lossless compression of PyTorch training checkpoints.

`save` and `load` stand in for `torch.save` and `torch.load`::

    import s4weights

    s4weights.save({"model": model.state_dict(), "step": step}, "step100.s4w")
    checkpoint = s4weights.load("step100.s4w", map_location="cuda")

Tensors on CUDA devices are encoded and decoded where they are. `load_into` fills tensors that are
there already. `verify` checks a file without PyTorch, and `inspect` tells what is in it.
"""

from __future__ import annotations

import logging

from ._core import __version__
from ._errors import (
    CorruptDataError,
    LimitError,
    MismatchError,
    NotFoundError,
    S4Error,
    StorageError,
    UnsafeLoadError,
    UnsupportedFormatError,
)
from ._load import inspect, load, verify
from ._load_into import load_into
from ._save import save

__all__ = [
    "CorruptDataError",
    "LimitError",
    "MismatchError",
    "NotFoundError",
    "S4Error",
    "StorageError",
    "UnsafeLoadError",
    "UnsupportedFormatError",
    "__version__",
    "inspect",
    "load",
    "load_into",
    "save",
    "verify",
]

logging.getLogger("s4weights").addHandler(logging.NullHandler())
