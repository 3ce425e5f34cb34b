"""Finds the positions in a pickled object of the globals that the restricted unpickler refuses.

The stream is run by an interpreter that only builds a sketch of the object: its containers and
calls, and their contents. Nothing is copied or formatted before it is needed, so that the length of
the stream bounds the work and the memory, even for a malicious stream.
"""

from __future__ import annotations

import pickletools
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterator
from typing import Any

from ._names import join
from ._storages import is_of_signal

#: The most globals that a message lists.
MAX_REFUSED = 9
#: The number of keys of a long path that a message shows at either end.
PATH_ENDS = 16
#: Limits on a key in a message: for one that is not a string, the most levels and parts of each;
#: for any, the most characters.
LABEL_DEPTH, LABEL_PARTS, LABEL_LENGTH = 3, 8, 200


class _Global:
    """A class or function that the stream names."""

    def __init__(self, module: str, name: str) -> None:
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        self.name = f"{module}.{name}"


class _NoKey:
    """The label of a part that has no key of its own: it shares the place of the whole."""


_HERE = _NoKey()
#: As `_HERE`, and the part's own parts share that place, too.
_SPREAD = _NoKey()


class _Object:
    """A container, or the result of a call: labelled parts, in order."""

    def __init__(self, parts: list[tuple[object, Any]]) -> None:
        self.parts = parts
        self._length = len(parts)

    def append(self, items: list[Any]) -> None:
        self.parts += enumerate(items, self._length)
        self._length += len(items)

    def update(self, items: list[Any]) -> None:
        # Keys are only turned into text when a path needs them.
        self.parts += zip(items[::2], items[1::2], strict=True)
        self.parts += [(_HERE, key) for key in items[::2] if isinstance(key, (_Global, _Object))]


def _label(key: Any, depth: int = 0) -> str:
    if isinstance(key, _Global):
        text = key.name
    elif isinstance(key, _Object):
        parts = [part for _, part in key.parts[:LABEL_PARTS]] if depth < LABEL_DEPTH else []
        words = [_label(part, depth + 1) for part in parts]
        words += ["..."] if len(key.parts) > len(parts) else []
        text = f"({', '.join(words)})"
    elif type(key) is int and key.bit_length() > 64:
        text = hex(key)
    else:
        text = str(key)
    return text if len(text) <= LABEL_LENGTH else f"{text[:LABEL_LENGTH]}..."


class _Sketch:
    """The interpreter. Opcodes that it lacks raise `KeyError`."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self._operations: dict[str, Callable[[Any], None]] = {
            "MARK": lambda arg: self.marks.append(len(self.stack)),
            "POP": lambda arg: self._drop(),
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
            "OBJ": lambda arg: self._make(self._pop_mark()),
            "INST": lambda arg: self._make([_Global(*arg.split(" ", 1)), *self._pop_mark()]),
            "NEXT_BUFFER": lambda arg: self._push([]),
            "READONLY_BUFFER": lambda arg: None,
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
                # `genops` itself raises if no STOP comes.
                continue
            elif opcode.arg is not None:  # numbers and strings
                self.stack.append(arg)
            else:
                raise KeyError(opcode.name)
        return self.stack[-1]

    def _push(self, parts: list[tuple[object, Any]]) -> None:
        self.stack.append(_Object(parts))

    def _drop(self) -> None:
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.stack.pop()

    def _drop_mark(self) -> None:
        self._pop_mark()

    def _pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError("pop from an empty stack")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def _pop_mark(self) -> list[Any]:
        at = self.marks.pop()
        items = self.stack[at:]
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
            target.append(items) if how == "append" else target.update(items)

    def _call(self, count: int) -> None:
        self._make(self._pop(count))

    def _make(self, items: list[Any]) -> None:
        function, *arguments = items
        # Arguments of a call have no keys of their own: they share the place of the result.
        self._push([(_HERE, function), *((_SPREAD, argument) for argument in arguments)])

    def _persistent(self) -> None:
        self._push([(_HERE, self.stack.pop())])

    def _build(self, arg: Any) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, _Object):
            target.parts.append((_HERE, state))


class _Step:
    """A position of the walk: a key, and the step that leads to it."""

    __slots__ = ("before", "key")

    def __init__(self, before: _Step | None, key: object) -> None:
        self.before = before
        self.key = key


def _path(step: _Step | None) -> str:
    keys: list[object] = []
    while step is not None:
        keys.append(step.key)
        step = step.before
    keys.reverse()
    if len(keys) > 2 * PATH_ENDS:
        keys = [*keys[:PATH_ENDS], "...", *keys[-PATH_ENDS:]]
    path = ""
    for key in keys:
        path = join(path, _label(key))
    return path


def _globals(root: Any) -> Iterator[tuple[_Step | None, str]]:
    seen: set[int] = set()
    todo: list[tuple[_Step | None, Any, bool]] = [(None, root, False)]
    while todo:
        step, item, spread = todo.pop()
        if isinstance(item, _Global):
            yield step, item.name
        elif isinstance(item, _Object) and id(item) not in seen:
            seen.add(id(item))
            for key, part in reversed(item.parts):
                here = step if spread or isinstance(key, _NoKey) else _Step(step, key)
                todo.append((here, part, key is _SPREAD))


#: The exceptions that `sketch` raises for a broken stream.
_BROKEN = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, MemoryError)


def sketch(stream: bytes) -> Any:
    """The sketch of a pickled object. Raises one of `_BROKEN` if the stream is broken."""
    return _Sketch().run(stream)


def is_broken(stream: bytes) -> bool:
    """Whether a stream is not a pickle, or is truncated."""
    try:
        sketch(stream)
    except _BROKEN as error:
        if is_of_signal(error):
            raise
        return True
    return False


def find_refused(stream: bytes) -> list[tuple[str, str]]:
    """Key path and name of each global that is not allowed, in order, up to a limit; empty if
    that cannot be determined.
    """
    from torch import _weights_only_unpickler as restricted

    allowed = {*restricted._get_allowed_globals(), *restricted._get_user_allowed_globals()}
    first: dict[str, _Step | None] = {}
    try:
        for step, name in _globals(sketch(stream)):
            if name not in allowed:
                first.setdefault(name, step)
            if len(first) == MAX_REFUSED:
                break
    except _BROKEN as error:
        if is_of_signal(error):
            raise
        return []  # The stream is broken, which its reader has reported already.
    return [(_path(step), name) for name, step in first.items()]
