"""PyTorch, where it is needed; and `torch.save` and `torch.load` as they are if not replaced by ours."""

from __future__ import annotations

import threading
from typing import Any

#: Set, to true, on functions that stand in for PyTorch's.
OURS = "_s4weights"


#: Calls of one another, beyond which they would go on for ever.
_MOST_CALLS = 16


class _Depth(threading.local):
    """How many calls of `call_original` this thread is in."""

    calls = 0


_depth = _Depth()


def original(name: str) -> Any:
    """PyTorch's function of this name, or what somebody else replaced it by."""
    return _originals(name)[0]


def call_original(name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls it. Where somebody wrapped ours, as in ``torch.load = partial(s4weights.load, ...)``, that
    comes back here: then it is the next one's turn.
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
    """What bears the name in `torch` and `torch.serialization`, and is not ours."""
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
        f"torch.{name} and torch.serialization.{name} were both replaced by s4weights.{name}: "
        "PyTorch's own is gone; s4weights.patch() keeps it"
    )


def require_torch(name: str) -> Any:
    """PyTorch, for the function of this name."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        what = f"s4weights.{name} needs PyTorch; s4weights.numpy does without, for arrays"
        raise ModuleNotFoundError(what, name="torch") from None
    return torch
