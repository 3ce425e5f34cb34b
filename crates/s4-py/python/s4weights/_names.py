"""Key paths: the place of a tensor in the saved object, as a name for its storage."""

from __future__ import annotations

import itertools
import types
from collections import deque
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from ._errors import LimitError, MismatchError
from ._storages import is_of_signal

if TYPE_CHECKING:
    import torch

#: The most bytes of UTF-8 that the format allows in a tensor's name.
MAX_NAME = 4096
#: The most characters of a key path.
MAX_PATH = 4 * MAX_NAME

#: The most levels and parts of a tuple that its label shows.
MAX_LABEL_DEPTH = 3
MAX_LABEL_PARTS = 16

#: The most objects that are visited to find names: names are only a convenience. And the most
#: further paths to objects of a state that were visited already.
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
    root: object, *, as_state: bool = False, whole: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor reachable through containers and attributes, with its path, in saving order.

    For saving, this only affects names: a tensor that is not found is saved under a generic name.

    Args:
        root: the object.
        as_state: walk modules as their state dicts, and yield a tensor once per path to it.
        whole: yield tensors of other layouts, too, and not their strided parts.
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
        parts: list[tuple[str, torch.Tensor]] = []
        children: list[tuple[str, Any]] = []
        try:
            is_tensor = isinstance(obj, torch.Tensor)
            if is_tensor:
                found = [("", obj)] if whole else _parts(obj)
                parts = [(join(path, p) if p else path, t) for p, t in found]
            # Nearly all tensors lead to nothing else.
            if not is_tensor or type(obj) is not torch.Tensor or obj.__dict__:
                children = [
                    (join(path, k), v) for k, v in _children(obj) if type(v) not in _PLAIN_LEAVES
                ]
        except Exception as error:
            # Code of the object's class, which pickling may not run.
            if is_of_signal(error):
                raise
        yield from parts
        todo.extendleft(reversed(children))


class Target(NamedTuple):
    """A tensor of a state to fill."""

    path: str
    tensor: torch.Tensor
    #: ``False`` for a tensor that a module's state dict only creates, such as a copy: filling it
    #: does not change the module.
    is_own: bool = True


def walk_targets(root: object) -> Iterator[Target]:
    """Like `walk_tensors` with ``as_state``, without the extra state of modules, which only they
    themselves can load.
    """
    import torch

    for path, obj in _walk_state(root):
        if isinstance(obj, torch.Tensor):
            yield Target(path, obj)
            continue
        owns = _Memory(obj)
        for name, tensor in obj.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor) and not _is_extra(name, tensor, owns):
                yield Target(join(path, name), tensor, owns.has(tensor))


def extra_state(root: object) -> list[str]:
    """The paths of the extra state of modules, and of other values in their state dicts."""
    import torch

    paths = []
    for path, obj in _walk_state(root):
        if isinstance(obj, torch.nn.Module):
            owns, state = _Memory(obj), obj.state_dict(keep_vars=True)
            paths += [
                join(path, name)
                for name, value in state.items()
                if not isinstance(value, torch.Tensor) or _is_extra(name, value, owns)
            ]
    return paths


class _Memory:
    """The memory that a module holds."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        # Kept, so that no other tensor gets the identity of one of them.
        self._registered = [*module.parameters(), *module.buffers()]
        self._ids = {id(tensor) for tensor in self._registered}
        self._storages: set[int | None] | None = None
        self._others: tuple[list[torch.Tensor], set[int | None]] | None = None

    def is_registered(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter or buffer, or part of one."""
        # Nearly all are: parameters that are not initialized, or shards, may have no storage.
        if id(tensor) in self._ids:
            return True
        if self._storages is None:
            self._storages = {_storage_of(held) for held in self._registered}
        return (key := _storage_of(tensor)) is not None and key in self._storages

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in memory that the module holds, in whatever attribute, also of a
        parameter: shards are the parts of other tensors.
        """
        if self.is_registered(tensor) or not tensor.numel():
            return True
        if self._others is None:
            held = [tensor for _, tensor in walk_tensors(self._module)]
            self._others = held, {_storage_of(tensor) for tensor in held}
        return (key := _storage_of(tensor)) is not None and key in self._others[1]


def _is_extra(name: str, tensor: torch.Tensor, owns: _Memory) -> bool:
    """Whether a tensor was made by a module's `get_extra_state`."""
    return name.rpartition(".")[2] == "_extra_state" and not owns.is_registered(tensor)


def _storage_of(tensor: torch.Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except Exception:  # It has none, as sparse ones and those that wrap others.
        return None


def _walk_state(root: object) -> Iterator[tuple[str, Any]]:
    """Yield every tensor and module reachable through containers and attributes, once per path.
    Parts of modules are not included.

    Raises `LimitError` if containers that occur in many places make too many paths.
    """
    import torch

    # With the objects themselves, so that no other one gets their identity.
    found: dict[int, tuple[Any, list[tuple[object, Any]] | None]] = {}
    # Only known once a container is reached again: most states are trees, and walked once.
    ways: dict[int, list[tuple[object, Any]] | None] | None = None
    seen: set[int] = set()
    again = 0
    # The objects above the current one, so that cycles end. The second time that an object is
    # taken, it is left.
    above: set[int] = set()
    todo: list[tuple[str, Any, bool]] = [("", root, False)]
    while todo:
        path, obj, leave = todo.pop()
        key = id(obj)
        if leave:
            above.discard(key)
            continue
        if key in above or (ways is not None and key not in ways):
            continue
        if type(obj) is torch.Tensor:
            children = None
            found[key] = obj, None
        elif type(obj) is not dict and isinstance(obj, _LEAVES):
            continue
        else:
            children = _state_parts(obj, found)
            if children is not None and not children:
                continue
        if key in seen:
            if ways is None and children is not None:
                ways = _ways(root, found)
                if key not in ways:
                    continue
            again += 1
            if again > MAX_VISITS:
                raise LimitError(f"more than {MAX_VISITS} paths to the same objects")
        seen.add(key)
        if children is None:
            yield path, obj
            continue
        if ways is not None:
            children = ways[key] or []
        above.add(key)
        todo.append((path, obj, True))
        todo += [(join(path, name), child, False) for name, child in reversed(children)]


def _state_parts(
    obj: Any, found: dict[int, tuple[Any, list[tuple[object, Any]] | None]]
) -> list[tuple[object, Any]] | None:
    """The parts of a container, or ``None`` for a tensor or a module; kept in ``found``."""
    import torch

    known = found.get(id(obj))
    if known is None:
        parts = None
        if not isinstance(obj, (torch.Tensor, torch.nn.Module)):
            parts = [(key, v) for key, v in _children(obj) if type(v) not in _PLAIN_LEAVES]
        known = found[id(obj)] = obj, parts
    return known[1]


def _ways(
    root: object, found: dict[int, tuple[Any, list[tuple[object, Any]] | None]]
) -> dict[int, list[tuple[object, Any]] | None]:
    """The tensors and modules, by identity, and the containers that lead to them:
    for each container, those of its parts that are here, too.
    """
    within: dict[int, list[int]] = {}
    ends, seen, todo = [], set(), [root]
    while todo:
        obj = todo.pop()
        if id(obj) in seen or isinstance(obj, _LEAVES):
            continue
        seen.add(id(obj))
        parts = _state_parts(obj, found)
        if parts is None:
            ends.append(id(obj))
            continue
        for _, part in parts:
            within.setdefault(id(part), []).append(id(obj))
            todo.append(part)
    ways: dict[int, list[tuple[object, Any]] | None] = {}
    while ends:
        key = ends.pop()
        if key not in ways:
            ways[key] = found[key][1]
            ends += within.get(key, ())
    return {
        key: None if parts is None else [part for part in parts if id(part[1]) in ways]
        for key, parts in ways.items()
    }


def tensors_by_path(root: object) -> dict[str, torch.Tensor]:
    """The tensors that `walk_tensors` finds in a state, by their paths.

    Raises `MismatchError` if two tensors have the same path, and so cannot be told apart.
    """
    found = _by_path(Target(*found) for found in walk_tensors(root, as_state=True))
    return {path: target.tensor for path, target in found.items()}


def targets_by_path(root: object) -> dict[str, Target]:
    """The targets in a state, by path (`walk_targets`); raises as `tensors_by_path` does."""
    return _by_path(walk_targets(root))


def _by_path(targets: Iterable[Target]) -> dict[str, Target]:
    found: dict[str, Target] = {}
    for target in targets:
        if found.setdefault(target.path, target).tensor is not target.tensor:
            raise MismatchError(f"`{target.path}` is the key path of two tensors")
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
