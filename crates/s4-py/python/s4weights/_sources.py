"""Inputs of `load`, `verify` and `inspect`: paths, URLs and streams, in one of several formats."""

from __future__ import annotations

import io
import numbers
import operator
import os
import re
import stat
from collections.abc import Mapping
from typing import IO, Any, NamedTuple, Union

from . import _core
from ._errors import NotFoundError, StorageError, UnsupportedFormatError
from ._nvcomp import load_nvcomp

FileLike = Union[str, "os.PathLike[str]", IO[bytes]]

#: Bytes at the start that distinguish formats: the length of a safetensors header, and its first
#: brace.
_HEAD = 9
#: Bytes at the end of a ``.s4w`` file that contain its length.
_TAIL = 64
_MAX_SAFETENSORS_HEADER = 100_000_000

#: The first bytes of files of `torch.save`: those of a ZIP archive, or of a pickle.
_TORCH = (b"PK", b"\x80")

#: The limit that numbers of threads stay below.
_THREADS = 1 << 64
#: The limit that seconds stay below: longer than anyone waits, and small enough to add to a clock.
_LONGEST = 1e9

#: Bytes per read from a stream that fills memory of the caller's: the first time, and at most.
_FIRST_STEP, _MOST_STEP = 1 << 20, 64 << 20


class Foreign(NamedTuple):
    """A file of another format, to be read by that format's own reader."""

    file: FileLike
    is_safetensors: bool


def path_of_url(url: str) -> str | None:
    """The path on this machine that a ``file:`` URL names, or ``None`` for other URLs."""
    # Python and URLs write bytes that are not UTF-8 differently.
    text = re.sub("[\udc80-\udcff]", lambda byte: f"%{ord(byte[0]) - 0xDC00:02X}", url)
    return _core.path_of_url(text.encode("utf-8", "replace").decode())


def is_url(f: object) -> bool:
    """Whether a target or source is a URL such as ``s3://bucket/key``."""
    # Names of files that are not UTF-8 contain surrogates, which native strings cannot.
    return isinstance(f, str) and _core.is_url(f.encode("utf-8", "replace").decode())


def check_threads(threads: object) -> None:
    """Raise unless ``threads`` is ``None`` or a number of threads: each call that takes threads
    checks them with this, before it does anything.
    """
    if threads is None:
        return
    try:
        number = operator.index(threads)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(threads, bool):
        raise TypeError(f"threads={threads!r}: expected an integer")
    if not 1 <= number < _THREADS:
        raise ValueError(f"threads={threads!r}: expected an integer of 1 or more")


def checked_options(storage_options: Mapping[str, str] | None) -> dict[str, str]:
    """A copy of ``storage_options``. Whether an object store knows them is checked when it is opened."""
    if storage_options is None:
        return {}
    if not isinstance(storage_options, Mapping):
        kind = type(storage_options).__name__
        raise TypeError(f"storage_options: expected a dict of names and values, not {kind}")
    for name, value in storage_options.items():
        if not isinstance(name, str):
            raise TypeError(f"storage_options: expected a name, not {name!r}")
        # The value itself may be a secret.
        if not isinstance(value, str):
            raise TypeError(f"storage_options: {name}: expected a string, not {type(value).__name__}")
    return dict(storage_options)


def absolute(place: str | os.PathLike[str]) -> str:
    """Return a folder as an absolute path, so that the working directory may change, or a URL unchanged."""
    text = os.fspath(place)
    if not isinstance(text, str):
        raise TypeError(f"{place!r}: expected a folder or a URL")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{place!r}: the path of a store must be valid UTF-8") from None
    if not text:
        raise ValueError("the path is empty: the current folder is '.'")
    return os.path.abspath(text) if "://" not in text and not is_url(text) else text


def check_flag(name: str, value: object) -> None:
    """Raise unless an argument is a boolean, which may be NumPy's."""
    if type(value) is not bool and type(value).__module__ != "numpy":
        raise TypeError(f"{name}={value!r}: expected True or False")


def check_seconds(name: str, value: object, positive: bool = False) -> None:
    """Raise unless an argument is a number of seconds, of any type, that a clock can count."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected a number of seconds")
    if not 0 <= value < _LONGEST or (positive and value == 0):  # type: ignore[operator]
        kind = "a positive number" if positive else "a number"
        raise ValueError(f"{name}={value!r}: expected {kind} of seconds")


def texts_of(name: str, given: Mapping[str, str] | None, convert: bool = False) -> dict[str, str]:
    """Return the strings of an argument by name, as they are stored. Other values are converted if
    ``convert`` is true, and otherwise refused.
    """
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"{name}={given!r}: expected a dict of strings")
    texts = {}
    for key, text in (given or {}).items():
        if convert:
            key, text = str(key), str(text)
        for part in (key, text):
            if not isinstance(part, str):
                raise TypeError(f"{name}: {key!r}: {text!r}: expected strings, not {part!r}")
            try:
                part.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"{name}: {part!r} cannot be encoded as UTF-8") from error
        texts[key] = text
    return texts


def open_source(
    f: FileLike,
    storage_options: Mapping[str, str] | None,
    threads: int | None,
    trusted: bool = False,
) -> _core.Reader | Foreign:
    """A native reader of a ``.s4w`` file, or a `Foreign` if it is in another format."""
    check_threads(threads)
    check_flag("trusted", trusted)
    if trusted:
        load_nvcomp()
    options = checked_options(storage_options)
    if is_url(f):
        # Opened as a path, since the file may be in another format.
        path = path_of_url(str(f))
        if path is None:
            return _core.Reader(None, str(f), None, threads, options, trusted)
        f = path
    if isinstance(f, (str, os.PathLike)):
        return _open_path(f, options, threads, trusted)
    return _open_stream(f, options, threads, trusted)


def require_s4w(source: _core.Reader | Foreign) -> _core.Reader:
    """The reader. Raises `UnsupportedFormatError`, which says what the file is instead."""
    if isinstance(source, Foreign):
        what = "a safetensors file" if source.is_safetensors else "not a .s4w file"
        raise UnsupportedFormatError(f"{source.file!r} is {what}")
    return source


def _open_path(
    f: str | os.PathLike[str], options: dict[str, str], threads: int | None, trusted: bool
) -> _core.Reader | Foreign:
    path = os.fspath(f)
    seen = _core.look_at(path) if type(path) is str else None
    if seen is None and _is_pipe(path):
        # It cannot seek, nor be opened twice.
        with open(path, "rb") as pipe:
            return _open_stream(io.BytesIO(pipe.read()), options, threads, trusted)
    head, ours = seen or _look_at(path)
    if ours:
        return _core.Reader(path, None, None, threads, options, trusted)
    return Foreign(f, path.endswith(".safetensors") or _is_safetensors(head))


def _is_pipe(path: str) -> bool:
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _look_at(path: str) -> tuple[bytes, bool]:
    """Like `_core.look_at`, but also for files that are not regular. Raises an error for one that cannot be read."""
    try:
        with open(path, "rb") as file:
            head, tail = file.read(_HEAD), _tail(file)
    except FileNotFoundError as error:
        raise NotFoundError(error.errno, error.strerror, path) from None
    except OSError as error:
        raise StorageError(error.errno, error.strerror, path) from error
    return head, _core.is_s4w(head) or _core.ends_s4w(tail)


def _open_stream(
    f: IO[bytes], options: dict[str, str], threads: int | None, trusted: bool
) -> _core.Reader | Foreign:
    if not hasattr(f, "read"):
        raise AttributeError(
            "expected a path, a URL or a file-like object with a 'read' attribute, not "
            f"{type(f).__name__}"
        )
    if not _is_seekable(f):
        data = f.read()
        head = data[:_HEAD]
        if _core.is_s4w(head):
            return _core.Reader(None, None, data, threads, options, trusted)
        if not head.startswith(_TORCH) and not _is_safetensors(head):
            # PyTorch reports what it requires of a stream.
            return Foreign(f, False)
        return Foreign(io.BytesIO(data), _is_safetensors(head))
    start = f.tell()
    head = f.read(_HEAD)
    path = _path_of(f) if start == 0 else None
    # Finding the end of other streams may mean reading or decompressing them.
    tail = _tail(f) if path is not None or (start == 0 and type(f) is io.BytesIO) else b""
    f.seek(start)
    if not _core.is_s4w(head) and not _core.ends_s4w(tail):
        return Foreign(f, _is_safetensors(head))
    if path is not None and _core.is_whole(tail, os.fstat(f.fileno()).st_size):
        f.seek(0, os.SEEK_END)
        return _core.Reader(path, None, None, threads, options, trusted)
    # Other objects may follow this one. `getvalue` of a `BytesIO` does not copy its bytes.
    data, at = (f.getvalue(), start) if type(f) is io.BytesIO else (_read_all(f), 0)
    length = _core.first_len(data, at)
    end = len(data) if length is None else at + length
    f.seek(start + end - at)
    return _core.Reader(None, None, data, threads, options, trusted, at, end)


def _read_all(f: Any) -> bytes:
    """The rest of a stream. Streams that are not Python's own often concatenate what they read. As
    PyTorch does, this lets them fill memory through ``readinto`` instead, if they can.
    """
    if isinstance(f, io.IOBase) or not callable(getattr(f, "readinto", None)):
        rest: bytes = f.read()
        return rest
    buffer, size, step = io.BytesIO(), 0, _FIRST_STEP
    while True:
        buffer.seek(size + step - 1)
        buffer.write(b"\0")
        with buffer.getbuffer() as memory, memory[size:] as free:
            got = f.readinto(free)
        if not got:
            break
        size, step = size + got, min(max(step, size), _MOST_STEP)
    buffer.truncate(size)
    return buffer.getvalue()


def _tail(f: IO[bytes]) -> bytes:
    """The last bytes of a seekable stream."""
    end = f.seek(0, os.SEEK_END)
    f.seek(max(end - _TAIL, 0))
    return f.read(_TAIL)


def _is_seekable(f: Any) -> bool:
    try:
        f.seek(f.tell())
    except (AttributeError, OSError):  # io.UnsupportedOperation is an OSError
        return False
    return True


def _path_of(f: Any) -> str | None:
    """The path of an open file, if it still leads to that file: it need not be read whole then."""
    name = getattr(f, "name", None)
    if (
        not isinstance(f, (io.BufferedReader, io.BufferedRandom, io.FileIO))
        or type(name) is not str
    ):
        return None
    try:
        return name if os.path.samestat(os.fstat(f.fileno()), os.stat(name)) else None
    except OSError:
        return None


def _is_safetensors(head: bytes) -> bool:
    length = int.from_bytes(head[:8], "little")
    return head[8:] == b"{" and 2 <= length <= _MAX_SAFETENSORS_HEADER
