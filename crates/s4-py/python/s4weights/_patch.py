"""`patch`: makes unmodified programs that call `torch.save` and `torch.load` use ``.s4w`` files."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from ._device import Compute
from ._load import get_unsafe_globals, load
from ._save import check_preset, save
from ._sources import check_threads
from ._torch import OURS, is_called_by_torch, original, require_torch

_lock = threading.Lock()
#: The active patches, the latest one last.
_active: list[Patch] = []


class Patch:
    """An active patch. Used as a context manager, it ends with the block."""

    def __init__(self, before: list[tuple[Any, str, Any]]) -> None:
        #: The modules, names and functions to restore at its end.
        self._before = before

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *exception: object) -> None:
        with _lock:
            if self in _active:
                self._remove()

    def _remove(self) -> None:
        at = _active.index(self)
        del _active[at]
        if at < len(_active):
            # A later patch stays in place. At its end it restores what this one would have.
            _active[at]._before = self._before
            return
        for module, name, function in self._before:
            setattr(module, name, function)


def patch(**options: Any) -> Patch:
    """Replace `torch.save` and `torch.load` with `save` and `load` in this process.

    Also replaces `torch.serialization.get_unsafe_globals_in_checkpoint` with `get_unsafe_globals`.

    Programs that call ``torch.save(...)`` then write ``.s4w`` files, without any change to the file
    names. ``torch.load(...)`` reads these files, files written by PyTorch, and safetensors files.
    Code that has already imported the functions (``from torch import save``) keeps the old ones.
    Data that PyTorch saves as part of something else (pickles of tensors, exported programs,
    distributed checkpoints) keeps its own format.

    ::

        s4weights.patch(preset="fast")

        with s4weights.patch():
            trainer.train()

    Args:
        options: defaults for all calls of `save` and `load`: ``preset``, ``threads``, ``device``
            and ``gpu_scratch``. `load` gets only the options that it supports.

    Returns:
        A context manager that undoes the patch when it exits. `unpatch` does the same.

    Raises:
        TypeError: an option is not one of these.
        ValueError: the value of an option is invalid.
    """
    torch = require_torch("patch")
    unknown = options.keys() - {"preset", "threads", "device", "gpu_scratch"}
    if unknown:
        raise TypeError(f"patch() got an unexpected keyword argument {min(unknown)!r}")
    if "preset" in options:
        check_preset(options["preset"])
    check_threads(options.get("threads"))
    device = options.get("device", "auto")
    # Calls look for a GPU, not this: a process that has started CUDA cannot use it after a fork.
    Compute("auto" if device == "cuda" else device, options.get("gpu_scratch"))
    of_load = {name: value for name, value in options.items() if name != "preset"}
    new_save = _replacing("save", save, options)
    new_load = _replacing("load", load, of_load)
    look = torch.serialization.get_unsafe_globals_in_checkpoint

    @functools.wraps(look)
    def new_look(f: Any) -> list[str]:
        return get_unsafe_globals(f)

    setattr(new_look, OURS, True)
    new: list[tuple[Any, str, Any]] = [
        (torch, "save", new_save),
        (torch, "load", new_load),
        (torch.serialization, "save", new_save),
        (torch.serialization, "load", new_load),
        (torch.serialization, look.__name__, new_look),
    ]
    with _lock:
        done = Patch([(module, name, getattr(module, name)) for module, name, _ in new])
        _active.append(done)
        for module, name, function in new:
            setattr(module, name, function)
    return done


def unpatch() -> None:
    """Undo the last `patch`. Does nothing if there is none."""
    with _lock:
        if _active:
            _active[-1]._remove()


def _replacing(name: str, ours: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    function = original(name)

    @functools.wraps(function)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if name == "save" and (is_called_by_torch() or _skips_data()):
            # Files without data, to be filled later, exist only in PyTorch's own format.
            return function(*args, **kwargs)
        done = ours(*args, **{**options, **kwargs})
        return None if name == "save" else done

    setattr(replacement, OURS, True)
    return replacement


def _skips_data() -> bool:
    import torch

    return bool(torch.serialization._serialization_tls.skip_data)
