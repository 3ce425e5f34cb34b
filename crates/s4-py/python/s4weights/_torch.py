"""Imports PyTorch when needed, and finds the original `torch.save` and `torch.load` behind our replacements."""

from __future__ import annotations

import sys
import threading
from typing import Any

#: An attribute that is set on our functions that replace PyTorch's.
OURS = "_s4weights"


#: The most nested calls of `call_original`: with more, the functions would call each other forever.
_MOST_CALLS = 16


class _Depth(threading.local):
    """The nesting depth of `call_original` on this thread."""

    calls = 0


_depth = _Depth()


def original(name: str) -> Any:
    """PyTorch's function of this name, or another library's replacement for it."""
    return _originals(name)[0]


def call_original(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call the original. If that is a wrapper of our function, as after
    ``torch.load = partial(s4weights.load, ...)``, this is called again and uses the next candidate.
    """
    found = _originals(name)
    if _depth.calls >= _MOST_CALLS:
        raise RuntimeError(_gone(name))
    function = found[min(_depth.calls, len(found) - 1)]
    _depth.calls += 1
    try:
        return function(*args, **kwargs)
    finally:
        _depth.calls -= 1


def _originals(name: str) -> list[Any]:
    """The functions of this name in `torch` and `torch.serialization` that are not ours."""
    import torch

    found = []
    for module in (torch, torch.serialization):
        function: Any = getattr(module, name, None)
        while getattr(function, OURS, False) and hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        if function is not None and not getattr(function, OURS, False):
            found.append(function)
    if not found:
        raise RuntimeError(_gone(name))
    return found


def _gone(name: str) -> str:
    return (
        f"torch.{name} and torch.serialization.{name} were both replaced by s4weights.{name}, so "
        "PyTorch's own function is lost; use s4weights.patch() to keep it"
    )


def is_called_by_torch() -> bool:
    """Whether the function that calls this was called by PyTorch itself: to pickle a tensor's
    storage, for an exported program or a distributed checkpoint. Those bytes are parts of other
    formats, which are read without us.
    """
    module = str(sys._getframe(2).f_globals.get("__name__"))
    return module.startswith("torch.") and not module.startswith("torch.testing.")


def require_torch(name: str) -> Any:
    """PyTorch. If it is missing, the error says that the function ``name`` needs it."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        what = f"s4weights.{name} needs PyTorch; for NumPy arrays, use s4weights.numpy, which does not"
        raise ModuleNotFoundError(what, name="torch") from None
    return torch
