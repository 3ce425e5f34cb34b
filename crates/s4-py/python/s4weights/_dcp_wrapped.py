"""Tensors that wrap others, such as quantized weights and optimizer states: the wrapped tensors are stored.

The wrapper itself is never recreated: a checkpoint is loaded in place, into a wrapper like it.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ._errors import UnsupportedFormatError

#: Follows the wrapper's name in the names of stored tensors. Alone it marks the wrapper's
#: description; with a path behind it, the tensor that is wrapped there.
MARK = "@="


class Wrapped(NamedTuple):
    """The description of a wrapper, and the tensors that it wraps, by attribute; for a wrapper in
    a wrapper, attributes are joined by periods.
    """

    description: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def to_json(self) -> bytes:
        return json.dumps(self.description, separators=(",", ":")).encode()


def unwrap(tensor: torch.Tensor, where: str) -> Wrapped | None:
    """Describe a wrapper and the tensors that it wraps; return ``None`` if the tensor is no wrapper."""
    if not is_traceable_wrapper_subclass(tensor):
        return None
    if isinstance(tensor, DTensor):
        raise UnsupportedFormatError(f"{where} is a DTensor: only the outermost wrapper may be a DTensor")
    names, context = tensor.__tensor_flatten__()
    tensors: dict[str, torch.Tensor] = {}
    inner: dict[str, Any] = {}
    for name in names:
        part = getattr(tensor, name)
        wrapped = unwrap(part, f"{where}.{name}")
        inner[name] = None if wrapped is None else wrapped.description
        if wrapped is None:
            tensors[name] = part
        else:
            tensors.update({f"{name}.{path}": t for path, t in wrapped.tensors.items()})
    description = {
        "class": _name(type(tensor)),
        "shape": list(tensor.shape),
        "context": _text(context),
        "tensors": inner,
    }
    return Wrapped(description, tensors)


def _text(value: Any) -> str:
    """A wrapper's context as text that is the same in all processes, on all devices of a type."""
    if isinstance(value, torch.device):
        return str(value.type)
    if isinstance(value, enum.Enum):
        return f"{_name(type(value))}.{value.name}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_text(k)}: {_text(v)}' for k, v in value.items())}}}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return _name(type(value)) + _text(fields)
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype)):
        return repr(value)
    # The `repr` of other objects may contain an address.
    return _name(value if callable(value) and hasattr(value, "__qualname__") else type(value))


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
