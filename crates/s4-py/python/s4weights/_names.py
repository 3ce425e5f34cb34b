"""Key paths: where in the saved object a tensor is, as a name for its storage."""

from __future__ import annotations

import itertools
import types
from collections import deque
from collections.abc import Container, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ._errors import MismatchError

if TYPE_CHECKING:
    import torch

#: The most bytes of UTF-8 that the format allows in a tensor's name.
MAX_NAME = 4096
#: The most characters of a key path.
MAX_PATH = 4 * MAX_NAME

#: The most levels and parts of a tuple that its label shows.
MAX_LABEL_DEPTH = 3
MAX_LABEL_PARTS = 16

#: The most objects that are visited to find names: names are only a convenience.
MAX_VISITS = 1 << 20

_PLAIN_LEAVES = frozenset((type(None), bool, int, float, complex, str, bytes, bytearray))
_LEAVES = (
    *(type(None), int, float, complex, str, bytes, bytearray, type),
    *(types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
)


def join(path: str, key: object) -> str:
    """The path of what lies under ``key`` of the object at ``path``: ``model.layers.0.weight``."""
    text = key if type(key) is str else label(key)
    path = f"{path}.{text}" if path else text
    # Objects may be nested deeply; the end of a path says more than its beginning.
    return path if len(path) <= MAX_PATH else f"...{path[-MAX_PATH // 2 :]}"


def label(key: object, depth: int = 0) -> str:
    """A key as text, without running code of its class."""
    if type(key) is int and key.bit_length() > 64:
        return hex(key)  # Python refuses to write very long ones in decimal.
    if type(key) in _PLAIN_LEAVES:
        return str(key)
    if type(key) is tuple and depth < MAX_LABEL_DEPTH:
        # Nested tuples would double the label at every level.
        parts = [label(part, depth + 1)[:MAX_NAME] for part in key[:MAX_LABEL_PARTS]]
        more = ["..."] if len(key) > MAX_LABEL_PARTS else []
        return f"({', '.join(parts + more)})"[:MAX_NAME]
    return type(key).__name__


def walk_tensors(
    root: object, *, as_state: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that containers and attributes lead to, with its path, in saving order.

    For saving, only names depend on it: a tensor that it does not reach is saved under a generic
    name.

    Args:
        root: the object.
        as_state: walk modules as their state dicts, and yield a tensor once per path to it.
    """
    import torch

    if as_state:
        for path, obj in _walk_state(root):
            if isinstance(obj, torch.Tensor):
                yield path, obj
            else:
                # State dicts of lazy modules, or of modules with hooks, may hold other values.
                state = obj.state_dict(keep_vars=True)
                tensors = [(n, t) for n, t in state.items() if isinstance(t, torch.Tensor)]
                yield from ((join(path, name), tensor) for name, tensor in tensors)
        return
    seen: set[int] = set()
    visits = 0
    todo: deque[tuple[str, Any]] = deque([("", root)])
    while todo and visits < MAX_VISITS:
        path, obj = todo.popleft()
        if isinstance(obj, _LEAVES) or id(obj) in seen:
            continue
        visits += 1
        seen.add(id(obj))
        if isinstance(obj, torch.Tensor):
            yield from ((join(path, p) if p else path, t) for p, t in _parts(obj))
            # Nearly all tensors lead to nothing else.
            if type(obj) is torch.Tensor and not obj.__dict__:
                continue
        children = [(join(path, k), v) for k, v in _children(obj) if type(v) not in _PLAIN_LEAVES]
        todo.extendleft(reversed(children))


def walk_modules(root: object) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules whose state dicts `walk_tensors` walks with ``as_state``, with their paths."""
    import torch

    return ((path, obj) for path, obj in _walk_state(root) if isinstance(obj, torch.nn.Module))


def _walk_state(root: object) -> Iterator[tuple[str, Any]]:
    """Every tensor and module that containers and attributes lead to, once per path to it. The
    parts of modules are left out.
    """
    import torch

    # Each path with the ids of the objects on the way to it, so that cycles end.
    todo: deque[tuple[str, Any, frozenset[int]]] = deque([("", root, frozenset())])
    while todo:
        path, obj, above = todo.popleft()
        if isinstance(obj, _LEAVES) or id(obj) in above:
            continue
        if isinstance(obj, (torch.Tensor, torch.nn.Module)):
            yield path, obj
            continue
        above = above | {id(obj)}
        children = [
            (join(path, k), v, above) for k, v in _children(obj) if type(v) not in _PLAIN_LEAVES
        ]
        todo.extendleft(reversed(children))


def tensors_by_path(root: object) -> dict[str, torch.Tensor]:
    """The tensors that `walk_tensors` finds in a state, by their paths.

    Raises `MismatchError` if two tensors have the same path, and so cannot be told apart.
    """
    found: dict[str, torch.Tensor] = {}
    for path, tensor in walk_tensors(root, as_state=True):
        if found.setdefault(path, tensor) is not tensor:
            raise MismatchError(f"`{path}` is the key path of two tensors")
    return found


def unique(path: str, known: Container[str]) -> str:
    """A path that is not in ``known``, with a number appended if need be: in
    ``{"a.b": x, "a": {"b": y}}``, two tensors have the same path.
    """
    if path not in known:
        return path
    return next(name for n in itertools.count(2) if (name := f"{path}~{n}") not in known)


def _children(obj: Any) -> list[tuple[object, Any]]:
    out: list[tuple[object, Any]] = []
    if type(obj) is dict:
        return [*obj.items()]
    if type(obj) in (list, tuple):
        return [*enumerate(obj)]
    if isinstance(obj, dict):
        # Not `obj.items()`: an attribute of that name may hide the method.
        out += type(obj).items(obj)
    elif isinstance(obj, (list, tuple, deque)):
        names = getattr(type(obj), "_fields", None) or range(len(obj))
        out += zip(names, obj, strict=False)
    elif isinstance(obj, (set, frozenset)):
        out += enumerate(obj)
    for key, value in _attributes(obj).items():
        if key in ("_parameters", "_buffers", "_modules") and isinstance(value, dict):
            out += value.items()
        else:
            out.append((key, value))
    return out


def _attributes(obj: object) -> dict[str, Any]:
    """Instance attributes, read without running any code of the object's class."""
    found: dict[str, Any] = {}
    with suppress(AttributeError, TypeError):
        found.update(object.__getattribute__(obj, "__dict__"))
    for cls in type(obj).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            descriptor = cls.__dict__.get(slot)
            if descriptor is not None and type(descriptor).__name__ == "member_descriptor":
                with suppress(AttributeError):
                    found.setdefault(slot, descriptor.__get__(obj, cls))
    return found


def _parts(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The strided tensors that a tensor is made of."""
    import torch

    if tensor.layout is torch.strided:
        return [("", tensor)]
    parts: dict[Any, tuple[str, ...]] = {
        torch.sparse_coo: ("_indices", "_values"),
        torch.sparse_csr: ("crow_indices", "col_indices", "values"),
        torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
        torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
        torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
    }
    return [(m.strip("_"), getattr(tensor, m)()) for m in parts.get(tensor.layout, ())]
