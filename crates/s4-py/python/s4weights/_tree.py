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
``{"tensor": 7}``                      tensor 7 of the file as it is stored, on the CPU,
                                       without gradient
``{"tensor": 7, ...}``                 a view of it, or more about it: ``dtype``; ``shape``;
                                       ``offset`` and ``stride`` in elements (absent: 0 and
                                       row-major); ``device`` that it was on; ``grad`` if it
                                       requires a gradient; ``parameter`` if it is a
                                       ``torch.nn.Parameter``
``{"same": 3}``                        the same object as the fourth tensor node
=====================================  =====================================================

The tree is ``{"root": node}``. An object that does not fit is pickled instead, as a whole. Trees
are written by the native part (`_core.Storages.tree`), and read here.
"""

from __future__ import annotations

import base64
import functools
import json
import math
import reprlib
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ._errors import CorruptDataError
from ._storages import MAX_RANK, StorageReader, fits

#: The limit that sizes stay below.
MAX_SIZE = 1 << 63

#: The kinds of nodes, and which members a node may have besides the one that names its kind.
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

#: Members of a tensor's node that say which part of a storage it is.
_PLACE = frozenset(["dtype", "shape", "offset", "stride"])

_short_repr = reprlib.Repr()
_short_repr.maxstring = _short_repr.maxother = 200


def parse_tree(text: str) -> Any:
    """The root node. The native reader has checked that no object has the same member twice, and
    that no string contains a lone surrogate."""
    tree = _decoder().decode(text)
    if type(tree) is not dict or tree.keys() != {"root"}:
        raise CorruptDataError("corrupt data (tree): expected an object with one member, `root`")
    return tree["root"]


def kind_of(node: dict[str, Any]) -> str:
    """The one member of a node that names its kind."""
    return _kind_of(tuple(node))


@functools.lru_cache(maxsize=1024)
def _kind_of(members: tuple[str, ...]) -> str:
    # Exceptions are not cached, so that the cache holds valid member names only.
    kinds = [member for member in members if member in _KINDS]
    if len(kinds) == 1 and set(members).difference(kinds) <= _KINDS[kinds[0]]:
        return kinds[0]
    raise CorruptDataError(f"corrupt data (tree): invalid node with members {brief(list(members))}")


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
        except (LookupError, TypeError, ValueError, struct.error) as error:
            if isinstance(error, CorruptDataError) or self._storages.is_of_caller(error):
                raise
            raise CorruptDataError(f"corrupt data (tree): {brief(error)}") from error

    def tensors(self) -> dict[str, Any]:
        """For a file without a tree: its tensors by name."""
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

    def _set(self, kind: Callable[[list[Any]], Any], items: list[Any]) -> Any:
        return kind(items)

    def _odict(self, value: Any, node: dict[str, Any]) -> OrderedDict[Any, Any]:
        out = OrderedDict(self._pairs(value))
        if "attrs" in node:
            attrs = self._node(node["attrs"])
            if type(attrs) is not dict or not all(type(key) is str for key in attrs):
                raise CorruptDataError("corrupt data (tree): invalid attributes")
            vars(out).update(attrs)
        return out

    def _complex(self, value: Any, node: dict[str, Any]) -> complex:
        # `complex` takes other numbers, too, such as the value that a tensor does not have yet.
        parts = self._items(value)
        if len(parts) != 2 or not all(type(part) in (int, float) for part in parts):
            raise CorruptDataError(f"corrupt data (tree): {brief(value)} is not a pair of floats")
        return complex(*parts)

    def _dtype(self, name: Any) -> Any:
        dtype = _dtypes().get(name) if type(name) is str else None
        if dtype is None:
            raise CorruptDataError(f"this version of PyTorch has no dtype {brief(name)}")
        return dtype

    def _device(self, name: Any) -> Any:
        try:
            return self._torch.device(_string(name))
        except RuntimeError as error:
            if self._storages.is_of_caller(error):
                raise
            message = f"this version of PyTorch has no device {brief(name)}"
            raise CorruptDataError(message) from error

    def _size(self, sizes: tuple[int, ...]) -> Any:
        return self._torch.Size(sizes)

    def _tensor(self, value: Any, node: dict[str, Any]) -> Any:
        number = natural(value)
        _, stored, shape, nbytes = self._storages.info(number)
        dtype = self._dtype(node.get("dtype", "uint8" if stored == "bytes" else stored))
        location = _string(node.get("device", "cpu"))
        tensor: Any = None
        # Errors of placing a storage are passed on as they are: they are outside the `try` below.
        if _PLACE.isdisjoint(node):
            tensor = self._storages.new_tensor(number, dtype, shape, location)
        place = None
        if tensor is None:
            shape, offset, stride = self._extent(dtype, shape, nbytes, node)
            place = self._storages.get(number, location), dtype, offset, shape, stride
        try:
            if place is not None:
                tensor = self._storages.on_fake_device(view(*place), location)
            grad = node.get("grad") is True
            if node.get("parameter") is True:
                tensor = self._torch.nn.Parameter(tensor, grad)
            elif grad:
                tensor.requires_grad_()
        except RuntimeError as error:
            if self._storages.is_of_caller(error):
                raise
            raise CorruptDataError(f"corrupt data (tree): {error}") from error
        self._tensors.append(tensor)
        return tensor

    def _extent(
        self, dtype: Any, shape: tuple[int, ...], nbytes: int, node: dict[str, Any]
    ) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
        """The shape of a view, and its offset and strides in elements."""
        if "shape" in node:
            shape = _dimensions(node["shape"])
        stride = _dimensions(node["stride"]) if "stride" in node else row_major(shape)
        offset = natural(node.get("offset", 0))
        if len(shape) != len(stride) or not fits(nbytes, dtype.itemsize, offset, shape, stride):
            message = f"corrupt data (tree): {brief(node)} extends beyond {nbytes} bytes"
            raise CorruptDataError(message)
        if math.prod(shape) * dtype.itemsize >= MAX_SIZE:
            raise CorruptDataError(f"corrupt data (tree): {brief(node)} has too many elements")
        return shape, offset, stride


#: The function that builds a node's object, by the node's kind.
_DECODERS: dict[str, Callable[[TreeDecoder, Any, dict[str, Any]], Any]] = {
    "tensor": lambda self, value, node: self._tensor(value, node),
    "dict": lambda self, value, node: dict(self._pairs(value)),
    "odict": TreeDecoder._odict,
    "tuple": lambda self, value, node: tuple(self._items(value)),
    "set": lambda self, value, node: self._set(set, self._items(value)),
    "frozenset": lambda self, value, node: self._set(frozenset, self._items(value)),
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
    """The dtypes by name. (`getattr` on PyTorch with any other name might import a module.)"""
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
        raise CorruptDataError("corrupt data (tree): expected an array")
    return value


def _string(value: Any) -> str:
    if type(value) is not str:
        raise CorruptDataError(f"corrupt data (tree): {brief(value)} is not a string")
    return value


def natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MAX_SIZE:
        raise CorruptDataError(f"corrupt data (tree): {brief(value)} is not a size")
    return value


def _naturals(value: Any) -> tuple[int, ...]:
    return tuple(natural(item) for item in _array(value))


def _dimensions(value: Any) -> tuple[int, ...]:
    if len(_array(value)) > MAX_RANK:
        raise CorruptDataError(f"corrupt data (tree): {len(value)} dimensions")
    return _naturals(value)


def brief(value: Any) -> str:
    """A value that was read, shortened for a message: values in files may have any length."""
    return _short_repr.repr(value)
