"""Finds out where in a pickled object the globals are that the restricted unpickler refuses.

The stream is run by an interpreter that builds nothing but a sketch of the object: which containers
and calls there are, and what they hold.
"""

from __future__ import annotations

import pickletools
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterator
from typing import Any

from ._names import join


class _Global:
    """A class or function that the stream names."""

    def __init__(self, module: str, name: str) -> None:
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        self.name = f"{module}.{name}"


class _Object:
    """A container, or the result of a call: labelled parts, in order."""

    def __init__(self, parts: list[tuple[object, Any]]) -> None:
        self.parts = parts

    def append(self, items: list[Any]) -> None:
        start = sum(1 for label, _ in self.parts if type(label) is int)
        self.parts += [(start + i, item) for i, item in enumerate(items)]

    def update(self, items: list[Any]) -> None:
        self.parts += [(_label(k), v) for k, v in zip(items[::2], items[1::2], strict=True)]
        self.parts += [(None, key) for key in items[::2] if isinstance(key, (_Global, _Object))]


_MARK = object()


def _label(key: Any) -> str:
    if isinstance(key, _Object):
        return f"({', '.join(_label(part) for _, part in key.parts)})"
    return key.name if isinstance(key, _Global) else str(key)


class _Sketch:
    """The interpreter. Opcodes that it lacks raise `KeyError`."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self._operations: dict[str, Callable[[Any], None]] = {
            "MARK": lambda arg: self.stack.append(_MARK),
            "POP": lambda arg: self.stack.__delitem__(-1),
            "POP_MARK": lambda arg: self._drop_mark(),
            "DUP": lambda arg: self.stack.append(self.stack[-1]),
            "EMPTY_LIST": lambda arg: self._push([]),
            "EMPTY_DICT": lambda arg: self._push([]),
            "EMPTY_TUPLE": lambda arg: self._push([]),
            "EMPTY_SET": lambda arg: self._push([]),
            "LIST": lambda arg: self._push(list(enumerate(self._pop_mark()))),
            "TUPLE": lambda arg: self._push(list(enumerate(self._pop_mark()))),
            "FROZENSET": lambda arg: self._push(list(enumerate(self._pop_mark()))),
            "TUPLE1": lambda arg: self._tuple(1),
            "TUPLE2": lambda arg: self._tuple(2),
            "TUPLE3": lambda arg: self._tuple(3),
            "DICT": self._dict,
            "APPEND": lambda arg: self._fill("append", [self.stack.pop()]),
            "APPENDS": lambda arg: self._fill("append", self._pop_mark()),
            "ADDITEMS": lambda arg: self._fill("append", self._pop_mark()),
            "SETITEM": lambda arg: self._fill("update", self._pop(2)),
            "SETITEMS": lambda arg: self._fill("update", self._pop_mark()),
            "GLOBAL": lambda arg: self.stack.append(_Global(*arg.split(" ", 1))),
            "STACK_GLOBAL": lambda arg: self.stack.append(_Global(*self._pop(2))),
            "REDUCE": lambda arg: self._call(2),
            "NEWOBJ": lambda arg: self._call(2),
            "NEWOBJ_EX": lambda arg: self._call(3),
            "BUILD": self._build,
            "PERSID": lambda arg: self._push([]),
            "BINPERSID": lambda arg: self._persistent(),
            "MEMOIZE": lambda arg: self.memo.update({len(self.memo): self.stack[-1]}),
        }
        for name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self._operations[name] = lambda arg: self.memo.update({arg: self.stack[-1]})
        for name in ("GET", "BINGET", "LONG_BINGET"):
            self._operations[name] = lambda arg: self.stack.append(self.memo[arg])
        self._operations["NONE"] = lambda arg: self.stack.append(None)
        self._operations["NEWTRUE"] = lambda arg: self.stack.append(True)
        self._operations["NEWFALSE"] = lambda arg: self.stack.append(False)

    def run(self, stream: bytes) -> Any:
        """The sketch of the object."""
        for opcode, arg, _ in pickletools.genops(stream):
            if opcode.name in self._operations:
                self._operations[opcode.name](arg)
            elif opcode.name in ("PROTO", "FRAME", "STOP"):
                continue
            elif opcode.arg is not None:  # numbers and strings
                self.stack.append(arg)
            else:
                raise KeyError(opcode.name)
        return self.stack[-1]

    def _push(self, parts: list[tuple[object, Any]]) -> None:
        self.stack.append(_Object(parts))

    def _drop_mark(self) -> None:
        self._pop_mark()

    def _pop(self, count: int) -> list[Any]:
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def _pop_mark(self) -> list[Any]:
        at = len(self.stack) - 1 - self.stack[::-1].index(_MARK)
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def _tuple(self, count: int) -> None:
        self._push(list(enumerate(self._pop(count))))

    def _dict(self, arg: Any) -> None:
        items = self._pop_mark()
        self._push([])
        self._fill("update", items)

    def _fill(self, how: str, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, _Object):
            getattr(target, how)(items)

    def _call(self, count: int) -> None:
        function, *arguments = self._pop(count)
        # What a call is given has no key of its own: it shares the place of the result.
        given = (a.parts if isinstance(a, _Object) else [(None, a)] for a in arguments)
        self._push([(None, function), *((None, value) for parts in given for _, value in parts)])

    def _persistent(self) -> None:
        self._push([(None, self.stack.pop())])

    def _build(self, arg: Any) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, _Object):
            target.parts.append((None, state))


def _globals(root: Any) -> Iterator[tuple[str, str]]:
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [("", root)]
    while todo:
        path, item = todo.pop()
        if isinstance(item, _Global):
            yield path, item.name
        elif isinstance(item, _Object) and id(item) not in seen:
            seen.add(id(item))
            parts = ((path if k is None else join(path, k), v) for k, v in item.parts)
            todo.extend(reversed(list(parts)))


def find_refused(stream: bytes) -> list[tuple[str, str]]:
    """Key path and name of each global that is not allowed, in order; empty if it cannot tell."""
    from torch import _weights_only_unpickler as restricted

    allowed = {*restricted._get_allowed_globals(), *restricted._get_user_allowed_globals()}
    try:
        found = list(_globals(_Sketch().run(stream)))
    except Exception:  # The stream is broken, which its reader has said already.
        return []
    first: dict[str, str] = {}
    for path, name in found:
        if name not in allowed:
            first.setdefault(name, path)
    return [(path, name) for name, path in first.items()]
