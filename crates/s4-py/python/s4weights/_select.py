"""Selects the parts of a tree that ``keys=`` names, so that the rest is not read."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from typing import Any

from ._errors import CorruptDataError
from ._names import join
from ._tree import kind_of, parse_tree

_PAIRS = ("dict", "odict")
_ITEMS = ("tuple", "set", "frozenset")


def select(text: str, keys: Iterable[str]) -> tuple[str, frozenset[int]]:
    """The tree with only the named parts, in the dicts that lead to them, and the indices of the
    tensors that it needs.

    A key is a path such as ``model`` or ``model.layers.0.weight``. Raises `KeyError` for a path
    that does not exist.
    """
    if isinstance(keys, str):
        raise TypeError("keys: expected a list of key paths, not a string")
    if not isinstance(keys, Iterable):
        raise TypeError(f"keys={keys!r}: expected a list of key paths")
    wanted = list(keys)
    for key in wanted:
        if not isinstance(key, str):
            raise TypeError(f"keys: expected key paths, not {key!r}")
    try:
        root = parse_tree(text)
        selection = _Selection(wanted, list(_tensor_nodes(root)))
        chosen = selection.choose(root, "")
    except CorruptDataError:
        raise
    except (LookupError, TypeError, ValueError, struct.error) as error:
        raise CorruptDataError(f"corrupt data (tree): {error!r}") from error
    missing = [key for key in wanted if key not in selection.found]
    if missing:
        raise KeyError(f"the checkpoint has nothing at {', '.join(map(repr, missing))}")
    return json.dumps({"root": chosen}), frozenset(selection.numbers)


def _tensor_nodes(node: Any) -> Iterator[dict[str, Any]]:
    """Tensor nodes in the order in which they are decoded."""
    if isinstance(node, list):
        for item in node:
            yield from _tensor_nodes(item)
    elif isinstance(node, dict):
        kind = kind_of(node)
        if kind == "tensor":
            yield node
        for part in (*_PAIRS, *_ITEMS, "attrs"):
            if part in node:
                yield from _tensor_nodes(node[part])


class _Selection:
    def __init__(self, keys: list[str], tensors: list[dict[str, Any]]) -> None:
        self._keys = keys
        self._tensors = tensors
        self._new: dict[int, int] = {}
        self._numbers_of = {id(node): i for i, node in enumerate(tensors)}
        self.found: set[str] = set()
        self.numbers: set[int] = set()

    def choose(self, node: Any, path: str) -> Any:
        """The wanted parts of a node that is not wanted as a whole, in the dicts that hold them."""
        if not isinstance(node, dict):
            return {"dict": []}
        kind = next((k for k in _PAIRS if k in node), None)
        if kind is None:
            return {"dict": []}
        pairs = []
        for key, value in node[kind]:
            here = join(path, _key(key))
            # Keys of state dicts contain dots: `model.layers.0` selects several of them.
            whole = {k for k in self._keys if f"{here}.".startswith(f"{k}.")}
            if whole:
                self.found |= whole | {k for k in self._keys if k.startswith(f"{here}.")}
                pairs.append([key, self._whole(value)])
            elif any(k.startswith(f"{here}.") for k in self._keys):
                before = len(self.found)
                part = self.choose(value, here)
                if len(self.found) > before:
                    pairs.append([key, part])
        return {kind: pairs}

    def _whole(self, node: Any) -> Any:
        """A complete node, with its references to tensor nodes adjusted."""
        if isinstance(node, list):
            return [self._whole(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "tensor" in node:
            return self._tensor(self._numbers_of[id(node)])
        if "same" in node:
            return self._tensor(node["same"])
        parts = (*_PAIRS, *_ITEMS, "attrs")
        return {k: self._whole(v) if k in parts else v for k, v in node.items()}

    def _tensor(self, at: int) -> Any:
        if at in self._new:
            return {"same": self._new[at]}
        self._new[at] = len(self._new)
        node = self._tensors[at]
        self.numbers.add(node["tensor"])
        return node


def _key(node: Any) -> Any:
    """A key in its original form."""
    if isinstance(node, dict):
        if "tuple" in node:
            return tuple(_key(part) for part in node["tuple"])
        if "int" in node:
            return int(node["int"], 16)
        if "float" in node:
            return struct.unpack(">d", bytes.fromhex(node["float"]))[0]
    return node
