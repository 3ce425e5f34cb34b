"""`torch.save` and `torch.load` as they are where they were not replaced by ours."""

from __future__ import annotations

from typing import Any

#: Set, to true, on functions that stand in for PyTorch's.
OURS = "_s4weights"


def original(name: str) -> Any:
    """PyTorch's function of this name, or what somebody else replaced it by."""
    import torch

    for module in (torch, torch.serialization):
        function = getattr(module, name)
        while getattr(function, OURS, False) and hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        if not getattr(function, OURS, False):
            return function
    raise RuntimeError(
        f"torch.{name} and torch.serialization.{name} were both replaced by s4weights.{name}: "
        "PyTorch's own is gone; s4weights.patch() keeps it"
    )
