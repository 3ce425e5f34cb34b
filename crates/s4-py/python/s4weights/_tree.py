"""The typed JSON tree: a saved object as any language can read it.

A node is a JSON value:

=====================================  =====================================================
``null``, ``true``, ``false``, string  themselves
number without ``.`` or exponent       an integer below 2**53 in size
number with ``.`` or exponent          a float (binary64), shortest digits that give it back
array                                  a list
``{"int": "-0x1f"}``                   an integer of any size, in hexadecimal
``{"float": "7ff8000000000000"}``      a float that is not finite: its bits
``{"complex": [re, im]}``              two floats
``{"bytes": b64}``, ``{"bytearray"}``  base64
``{"tuple": [...]}``                   likewise ``set`` and ``frozenset``
``{"dict": [[key, value], ...]}``      in order; keys are strings, numbers, booleans, null or
                                       tuples of those
``{"odict": [...], "attrs": node}``    a ``collections.OrderedDict``; ``attrs``, its instance
                                       attributes as a dict, may be absent
``{"torch.Size": [2, 3]}``             likewise ``{"torch.dtype": "float32"}`` and
                                       ``{"torch.device": "cuda:0"}``
``{"tensor": 7}``                      tensor 7 of the file as it is there, on the CPU,
                                       without gradient
``{"tensor": 7, ...}``                 a view of it, or more about it: ``dtype``; ``shape``;
                                       ``offset`` and ``stride`` in elements (absent: 0 and
                                       row-major); ``device`` that it was on; ``grad`` if it
                                       requires a gradient; ``parameter`` if it is a
                                       ``torch.nn.Parameter``
``{"same": 3}``                        the same object as the fourth tensor node
=====================================  =====================================================

The tree is ``{"root": node}``. An object that does not fit (`NotPlain`) is pickled instead: the
form is decided for the whole object.
"""

from __future__ import annotations

import base64
import functools
import json
import math
import reprlib
import struct
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from ._device import as_tensor, is_array
from ._errors import CorruptDataError
from ._names import join
from ._storages import (
    StorageReader,
    StorageWriter,
    covering_shape,
    dtype_name,
    fits,
    require_storage,
    strided_test,
)

if TYPE_CHECKING:
    import torch

#: Deepest nesting: JSON readers that stop at 128 levels can read it (a dict takes three).
MAX_DEPTH = 32
#: Nodes of a tree. Larger objects (long lists of numbers) are smaller and faster as a pickle.
MAX_NODES = 1 << 20
#: Bytes of the JSON text, and of byte strings in it.
MAX_TEXT = 64 << 20
MAX_BYTES = 1 << 20

#: Dimensions of a tensor, as in the format, and what no size reaches.
MAX_RANK = 64
MAX_SIZE = 1 << 63

_SAFE_INT = 1 << 53

_TEXT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

#: Kinds of nodes, and the members that a node of each may have besides the one that names it.
_KINDS: dict[str, frozenset[str]] = {
    "int": frozenset(),
    "float": frozenset(),
    "complex": frozenset(),
    "bytes": frozenset(),
    "bytearray": frozenset(),
    "tuple": frozenset(),
    "set": frozenset(),
    "frozenset": frozenset(),
    "dict": frozenset(),
    "odict": frozenset(["attrs"]),
    "torch.Size": frozenset(),
    "torch.dtype": frozenset(),
    "torch.device": frozenset(),
    "tensor": frozenset(["dtype", "shape", "offset", "stride", "device", "grad", "parameter"]),
    "same": frozenset(),
}

#: Members of a tensor's node that say which part of a storage it is, or where that is to be.
_PLACE = frozenset(["dtype", "shape", "offset", "stride", "device"])

_short_repr = reprlib.Repr()
_short_repr.maxstring = _short_repr.maxother = 200


class NotPlain(Exception):
    """The object needs a pickle: it is more than plain values in plain containers."""


class TreeEncoder:
    """Writes an object as a tree and numbers the storages of its tensors."""

    def __init__(self, storages: StorageWriter) -> None:
        import torch

        self._torch = torch
        self._parameter = torch.nn.Parameter
        self._storages = storages
        self._seen: set[int] = set()
        self._tensors: dict[int, int] = {}
        self._tags: dict[torch.device, str] = {}
        self._nodes = 0
        self._kinds = _encoders()
        self._is_strided = strided_test()
        # Names of dimensions, which PyTorch gives up.
        self._may_have_names = hasattr(torch.Tensor, "names")
        self._tensor_kinds: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)

    def encode(self, obj: object) -> str:
        """The tree as JSON text.

        Raises `NotPlain` if it cannot be one; the storages are then to be thrown away.
        """
        self._scan(obj)
        text = _TEXT.encode({"root": self._node(obj, "", 0)})
        if len(text) > MAX_TEXT or not _is_utf8(text):
            raise NotPlain
        return text

    def _scan(self, root: object) -> None:
        """Looks for what is not plain before work is spent on what is."""
        budget, todo = MAX_NODES, [root]
        leaves = frozenset([*self._tensor_kinds, type(None), bool, int, float, str])
        while todo:
            obj = todo.pop()
            if type(obj) not in self._kinds and not is_array(obj):
                raise NotPlain
            items: Collection[Any] = ()
            if isinstance(obj, dict):
                items = obj.values()
            elif isinstance(obj, (list, tuple, set, frozenset)):
                items = obj
            budget -= 1 + len(items)
            if budget < 0:
                raise NotPlain
            # Most are leaves: each costs no more than this.
            todo += [item for item in items if type(item) not in leaves]

    def _node(self, obj: Any, path: str, depth: int) -> Any:
        self._nodes += 1
        kind = self._kinds.get(type(obj)) or (TreeEncoder._array if is_array(obj) else None)
        if kind is None or depth > MAX_DEPTH or self._nodes > MAX_NODES:
            raise NotPlain
        return kind(self, obj, path, depth + 1)

    def _once(self, obj: object) -> None:
        """Containers that can change are met once: sharing them, or a cycle, needs a pickle."""
        if id(obj) in self._seen:
            raise NotPlain
        self._seen.add(id(obj))

    def _same(self, obj: Any, path: str, depth: int) -> Any:
        return obj

    def _int(self, obj: int, path: str, depth: int) -> Any:
        return obj if -_SAFE_INT < obj < _SAFE_INT else {"int": hex(obj)}

    def _float(self, obj: float, path: str, depth: int) -> Any:
        return obj if math.isfinite(obj) else {"float": struct.pack(">d", obj).hex()}

    def _complex(self, obj: complex, path: str, depth: int) -> Any:
        return {"complex": [self._float(obj.real, path, depth), self._float(obj.imag, path, depth)]}

    def _bytes(self, obj: bytes | bytearray, path: str, depth: int) -> Any:
        if len(obj) > MAX_BYTES:
            raise NotPlain
        return {type(obj).__name__: base64.b64encode(obj).decode("ascii")}

    def _bytearray(self, obj: bytearray, path: str, depth: int) -> Any:
        self._once(obj)
        return self._bytes(obj, path, depth)

    def _items(self, items: Any, path: str, depth: int) -> list[Any]:
        return [self._node(item, join(path, i), depth) for i, item in enumerate(items)]

    def _list(self, obj: list[Any], path: str, depth: int) -> Any:
        self._once(obj)
        return self._items(obj, path, depth)

    def _tuple(self, obj: tuple[Any, ...], path: str, depth: int) -> Any:
        return {"tuple": self._items(obj, path, depth)}

    def _set(self, obj: set[Any], path: str, depth: int) -> Any:
        self._once(obj)
        return {"set": self._items(obj, path, depth)}

    def _frozenset(self, obj: frozenset[Any], path: str, depth: int) -> Any:
        return {"frozenset": self._items(obj, path, depth)}

    def _pairs(self, obj: dict[Any, Any], path: str, depth: int) -> list[Any]:
        self._once(obj)
        key_of, node, tensor, kinds = self._key, self._node, self._tensor, self._tensor_kinds
        if obj and depth > MAX_DEPTH:
            raise NotPlain
        pairs = []
        for key, value in obj.items():
            named = key if type(key) is str else key_of(key, path, depth)
            # Most values are tensors, which `_scan` has counted.
            of = tensor if type(value) in kinds else node
            pairs.append([named, of(value, join(path, key), depth)])
        return pairs

    def _key(self, key: Any, path: str, depth: int) -> Any:
        kind = type(key)
        if kind is str:
            return key
        if kind is tuple and depth < MAX_DEPTH:
            return {"tuple": [self._key(part, path, depth + 1) for part in key]}
        if kind in (int, float, bool, type(None)):
            return self._node(key, path, depth)
        raise NotPlain

    def _dict(self, obj: dict[Any, Any], path: str, depth: int) -> Any:
        return {"dict": self._pairs(obj, path, depth)}

    def _odict(self, obj: OrderedDict[Any, Any], path: str, depth: int) -> Any:
        node = {"odict": self._pairs(obj, path, depth)}
        if vars(obj):
            node["attrs"] = self._node(vars(obj), path, depth)
        return node

    def _tensor(self, obj: Any, path: str, depth: int) -> Any:
        known = self._tensors.get(id(obj))
        if known is not None:
            return {"same": known}
        self._tensors[id(obj)] = len(self._tensors)
        try:
            plain = self._is_plain(obj)
        except RuntimeError:  # Wrappers refuse one question or another; pickling knows about them.
            plain = False
        if not plain:
            raise NotPlain
        node = self._tensor_node(obj, path)
        self._storages.note(obj, node["tensor"])
        return node

    def _array(self, obj: Any, path: str, depth: int) -> Any:
        if id(obj) in self._tensors:
            return {"same": self._tensors[id(obj)]}
        tensor = as_tensor(obj)
        if tensor is None or not self._is_plain(tensor):
            raise NotPlain
        self._tensors[id(obj)] = len(self._tensors)
        return self._tensor_node(tensor, path)

    def _tensor_node(self, obj: Any, path: str) -> Any:
        storages, storage = self._storages, obj.untyped_storage()
        dtype, shape = obj.dtype, obj.shape
        whole = covering_shape(obj, storage)
        if whole is None:
            require_storage(obj, path)
        number = storages.find_storage(storage)
        if number is None:
            number = storages.add(storage, path, dtype, whole)
        stored = storages.entry(number)
        node: dict[str, Any] = {"tensor": number}
        # Most are the first tensor of their storage, and all of it.
        if stored.shape is not whole or stored.dtype == "bytes":
            if stored.dtype == "bytes" or dtype_name(dtype) != stored.dtype:
                node["dtype"] = _short(dtype)
            if shape != stored.shape:
                node["shape"] = [*shape]
            if offset := obj.storage_offset():
                node["offset"] = offset
        if (stride := obj.stride()) != row_major(shape):
            node["stride"] = [*stride]
        if not obj.is_cpu:
            node["device"] = self._tag(storage)
        if obj.requires_grad:
            node["grad"] = True
        if type(obj) is self._parameter:
            node["parameter"] = True
        return node

    def _is_plain(self, tensor: Any) -> bool:
        """Of a tensor or parameter of PyTorch's own classes: whether its state is what they have as attributes."""
        return bool(
            self._is_strided(tensor)
            and not tensor.__dict__
            and not tensor._backward_hooks
            and not tensor.is_conj()
            and not tensor.is_neg()
            and not (self._may_have_names and any(tensor.names))
        )

    def _tag(self, storage: torch.UntypedStorage) -> str:
        """What PyTorch calls a storage's device; it asks one kind of device after the other."""
        device = storage.device
        tag = self._tags.get(device)
        if tag is None:
            tag = self._torch.serialization.location_tag(storage)
            if device.type == "cuda":
                self._tags[device] = tag
        return str(tag)


@functools.cache
def _encoders() -> dict[type, Callable[[TreeEncoder, Any, str, int], Any]]:
    """What makes a node of an object, by its type."""
    import torch

    encoder = TreeEncoder
    return {
        type(None): encoder._same,
        bool: encoder._same,
        str: encoder._same,
        int: encoder._int,
        float: encoder._float,
        complex: encoder._complex,
        bytes: encoder._bytes,
        bytearray: encoder._bytearray,
        list: encoder._list,
        tuple: encoder._tuple,
        set: encoder._set,
        frozenset: encoder._frozenset,
        dict: encoder._dict,
        OrderedDict: encoder._odict,
        torch.Tensor: encoder._tensor,
        torch.nn.Parameter: encoder._tensor,
        torch.Size: lambda self, obj, path, depth: {"torch.Size": list(obj)},
        torch.dtype: lambda self, obj, path, depth: {"torch.dtype": _short(obj)},
        torch.device: lambda self, obj, path, depth: {"torch.device": str(obj)},
    }


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # lone surrogates
        return False
    return True


def parse_tree(text: str) -> Any:
    """The root node. The native reader has checked that no object has a member twice, and that no
    text has half of a surrogate pair."""
    tree = _decoder().decode(text)
    if type(tree) is not dict or tree.keys() != {"root"}:
        raise CorruptDataError("corrupt data (tree): an object with one member, `root`, expected")
    return tree["root"]


def kind_of(node: dict[str, Any]) -> str:
    """The one member of a node that names its kind."""
    if len(node) == 1:
        (kind,) = node
        if kind in _KINDS:
            return kind
    kinds = [member for member in node if member in _KINDS]
    if len(kinds) == 1 and (len(node) == 1 or node.keys() - kinds <= _KINDS[kinds[0]]):
        return kinds[0]
    raise CorruptDataError(f"corrupt data (tree): no node has the members {brief(list(node))}")


class TreeDecoder:
    """Builds the object that a tree describes. Nothing in a tree is executed."""

    def __init__(self, storages: StorageReader) -> None:
        import torch

        self._torch = torch
        self._storages = storages
        self._tensors: list[Any] = []

    def decode(self, text: str) -> Any:
        """The object. Raises `CorruptDataError` if the text is not a tree."""
        try:
            return self._node(parse_tree(text))
        except (LookupError, TypeError, ValueError, RecursionError, struct.error) as error:
            if isinstance(error, CorruptDataError):
                raise
            raise CorruptDataError(f"corrupt data (tree): {brief(error)}") from error

    def tensors(self) -> dict[str, Any]:
        """A file without a tree: its tensors by name."""
        numbers = range(len(self._storages))
        return {self._storages.info(i)[0]: self._tensor(i, {}) for i in numbers}

    def _node(self, node: Any) -> Any:
        if isinstance(node, list):
            return self._items(node)
        if not isinstance(node, dict):
            return node
        kind = kind_of(node)
        return _DECODERS[kind](self, node[kind], node)

    def _items(self, value: Any) -> list[Any]:
        return [self._node(item) for item in _array(value)]

    def _pairs(self, value: Any) -> list[tuple[Any, Any]]:
        pairs = (_array(pair) for pair in _array(value))
        return [(self._node(key), self._node(item)) for key, item in pairs]

    def _odict(self, value: Any, node: dict[str, Any]) -> OrderedDict[Any, Any]:
        out = OrderedDict(self._pairs(value))
        if "attrs" in node:
            attrs = self._node(node["attrs"])
            if type(attrs) is not dict or not all(type(key) is str for key in attrs):
                raise CorruptDataError("corrupt data (tree): attributes")
            vars(out).update(attrs)
        return out

    def _complex(self, value: Any, node: dict[str, Any]) -> complex:
        real, imag = self._items(value)
        return complex(real, imag)

    def _dtype(self, name: Any) -> Any:
        dtype = _dtypes().get(name) if type(name) is str else None
        if dtype is None:
            raise CorruptDataError(f"this version of PyTorch has no dtype {brief(name)}")
        return dtype

    def _device(self, name: Any) -> Any:
        try:
            return self._torch.device(_string(name))
        except RuntimeError as error:
            message = f"this version of PyTorch has no device {brief(name)}"
            raise CorruptDataError(message) from error

    def _size(self, sizes: tuple[int, ...]) -> Any:
        return self._torch.Size(sizes)

    def _tensor(self, value: Any, node: dict[str, Any]) -> Any:
        number = natural(value)
        _, stored, shape, nbytes = self._storages.info(number)
        dtype = self._dtype(node.get("dtype", "uint8" if stored == "bytes" else stored))
        tensor: Any = None
        if _PLACE.isdisjoint(node):
            tensor = self._storages.new_tensor(number, dtype, shape)
        # What placing a storage raises is passed on as it is.
        place = self._place(number, dtype, shape, nbytes, node) if tensor is None else None
        try:
            if place is not None:
                tensor = self._storages.on_fake_device(view(*place), node.get("device", "cpu"))
            grad = node.get("grad") is True
            if node.get("parameter") is True:
                tensor = self._torch.nn.Parameter(tensor, grad)
            elif grad:
                tensor.requires_grad_()
        except RuntimeError as error:
            raise CorruptDataError(f"corrupt data (tree): {error}") from error
        self._tensors.append(tensor)
        return tensor

    def _place(
        self,
        number: int,
        dtype: Any,
        shape: tuple[int, ...],
        nbytes: int,
        node: dict[str, Any],
    ) -> tuple[Any, Any, int, tuple[int, ...], tuple[int, ...]]:
        """What `view` makes a tensor of, on a storage that others may be on, too."""
        shape, offset, stride = self._extent(dtype, shape, nbytes, node)
        storage = self._storages.get(number, _string(node.get("device", "cpu")))
        return storage, dtype, offset, shape, stride

    def _extent(
        self, dtype: Any, shape: tuple[int, ...], nbytes: int, node: dict[str, Any]
    ) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
        """The shape of a view, and its offset and strides in elements."""
        if "shape" in node:
            shape = _dimensions(node["shape"])
        stride = _dimensions(node["stride"]) if "stride" in node else row_major(shape)
        offset = natural(node.get("offset", 0))
        if len(shape) != len(stride) or not fits(nbytes, dtype.itemsize, offset, shape, stride):
            message = f"corrupt data (tree): {brief(node)} lies outside of {nbytes} bytes"
            raise CorruptDataError(message)
        if math.prod(shape) * dtype.itemsize >= MAX_SIZE:
            raise CorruptDataError(f"corrupt data (tree): {brief(node)} has too many elements")
        return shape, offset, stride


#: What makes an object of a node, by its kind.
_DECODERS: dict[str, Callable[[TreeDecoder, Any, dict[str, Any]], Any]] = {
    "tensor": lambda self, value, node: self._tensor(value, node),
    "dict": lambda self, value, node: dict(self._pairs(value)),
    "odict": TreeDecoder._odict,
    "tuple": lambda self, value, node: tuple(self._items(value)),
    "set": lambda self, value, node: set(self._items(value)),
    "frozenset": lambda self, value, node: frozenset(self._items(value)),
    "int": lambda self, value, node: int(value, 16),
    "float": lambda self, value, node: struct.unpack(">d", bytes.fromhex(value))[0],
    "complex": TreeDecoder._complex,
    "bytes": lambda self, value, node: base64.b64decode(value, validate=True),
    "bytearray": lambda self, value, node: bytearray(base64.b64decode(value, validate=True)),
    "torch.Size": lambda self, value, node: self._size(_naturals(value)),
    "torch.dtype": lambda self, value, node: self._dtype(value),
    "torch.device": lambda self, value, node: self._device(value),
    "same": lambda self, value, node: self._tensors[natural(value)],
}


def view(
    storage: Any, dtype: Any, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> Any:
    """A tensor on a storage; the extent has been checked."""
    import torch

    tensor = torch.empty((0,), dtype=dtype, device=storage.device)
    return tensor.set_(storage, offset, shape, stride)


@functools.lru_cache(maxsize=1024)
def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, in elements."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


@functools.cache
def _dtypes() -> dict[str, Any]:
    """The dtypes by their names: asking PyTorch for any other name may import a module."""
    import torch

    return {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _decoder() -> json.JSONDecoder:
    return json.JSONDecoder(parse_constant=_no_constant)


def _no_constant(name: str) -> Any:
    raise CorruptDataError(f"corrupt data (tree): {name}")


def _array(value: Any) -> list[Any]:
    if type(value) is not list:
        raise CorruptDataError("corrupt data (tree): array expected")
    return value


def _string(value: Any) -> str:
    if type(value) is not str:
        raise CorruptDataError(f"corrupt data (tree): {brief(value)} is no text")
    return value


def natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MAX_SIZE:
        raise CorruptDataError(f"corrupt data (tree): {brief(value)} is no size")
    return value


def _naturals(value: Any) -> tuple[int, ...]:
    return tuple(natural(item) for item in _array(value))


def _dimensions(value: Any) -> tuple[int, ...]:
    if len(_array(value)) > MAX_RANK:
        raise CorruptDataError(f"corrupt data (tree): {len(value)} dimensions")
    return _naturals(value)


def brief(value: Any) -> str:
    """What was read, for a message: files may hold any amount of it."""
    return _short_repr.repr(value)
