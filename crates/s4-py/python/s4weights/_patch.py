"""`patch`: programs that call `torch.save` and `torch.load`, unmodified, with ``.s4w`` files."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from ._load import load
from ._save import save
from ._torch import OURS, original

_lock = threading.Lock()
#: What `unpatch` puts back, the innermost patch last: (save, load) of torch and torch.serialization.
_before: list[tuple[Any, Any, Any, Any]] = []


class Patch:
    """A patch that is in force: as a context manager, until the block ends."""

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *exception: object) -> None:
        unpatch()


def patch(**options: Any) -> Patch:
    """Replaces `torch.save` and `torch.load` by `save` and `load`, in this process.

    Programs that look them up when they call them (``torch.save(...)``) then write ``.s4w`` files,
    under the names that they chose, and read those and files of `torch.save` and safetensors. One
    that imported the functions before (``from torch import save``) keeps the old ones.

    ::

        s4weights.patch(preset="fast")

        with s4weights.patch():
            trainer.train()

    Args:
        options: for both, each time they are called: `save`'s ``preset``, ``threads``, ``device``,
            ``gpu_scratch``. `load` gets those that it knows.

    Returns:
        A context manager that takes the patch back; or call `unpatch`.

    Raises:
        TypeError: an option is not one of those.
    """
    import torch

    unknown = options.keys() - {"preset", "threads", "device", "gpu_scratch"}
    if unknown:
        raise TypeError(f"patch() got an unexpected keyword argument {min(unknown)!r}")
    of_load = {name: value for name, value in options.items() if name != "preset"}
    new_save = _replacing("save", save, options)
    new_load = _replacing("load", load, of_load)
    with _lock:
        modules: tuple[Any, Any] = (torch, torch.serialization)
        _before.append(tuple(getattr(m, n) for m in modules for n in ("save", "load")))
        for module in modules:
            module.save, module.load = new_save, new_load
    return Patch()


def unpatch() -> None:
    """Takes the last `patch` back. Does nothing if there is none."""
    import torch

    with _lock:
        if _before:
            saved = _before.pop()
            torch.save, torch.load, torch.serialization.save, torch.serialization.load = saved


def _replacing(name: str, ours: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    function = original(name)

    @functools.wraps(function)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if name == "save" and _skips_data():
            # A file without data, to be filled later, is a thing of torch's own format.
            return function(*args, **kwargs)
        done = ours(*args, **{**options, **kwargs})
        return None if name == "save" else done

    setattr(replacement, OURS, True)
    return replacement


def _skips_data() -> bool:
    import torch

    return bool(torch.serialization._serialization_tls.skip_data)
