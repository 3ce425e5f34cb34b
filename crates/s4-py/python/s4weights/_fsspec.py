"""The fsspec protocol ``s4w``: files of `torch.save`, one or several in a row, are stored as ``.s4w`` files
and read as what they were.

``s4w://runs/a`` and ``s4w://s3://bucket/run`` are what is below, compressed: every file that is written
and holds tensors of `torch.save` is a ``.s4w`` file of its own there; all others, and what other programs
put there, are as they are. `torch.distributed.checkpoint` finds its storage by it::

    dcp.save(state, checkpoint_id="s4w:///runs/a/step-1000")
"""

from __future__ import annotations

import io
import json
from typing import Any, NamedTuple

import fsspec
import torch
from fsspec.core import url_to_fs

from . import _core
from ._errors import CorruptDataError
from ._storages import dtype_name
from ._torch_zip import find_storages

#: The blob that says what the file was.
_BLOB = "stream"
#: What is stored of the bytes between tensors.
_REST = "rest"


class S4wFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """What is below another file system, compressed."""

    protocol = "s4w"
    cachable = False

    def __init__(self, **storage_options: Any) -> None:
        super().__init__(**storage_options)
        self._options = storage_options

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        return str(path).removeprefix("s4w://")

    def _below(self, path: Any) -> tuple[Any, str]:
        fs, inner = url_to_fs(self._strip_protocol(path), **self._options)
        return fs, inner

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        """Lists what is below, with the sizes that it takes there."""
        fs, inner = self._below(path)
        return fs.ls(inner, detail=detail, **kwargs)

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """As it is below."""
        fs, inner = self._below(path)
        return dict(fs.info(inner, **kwargs))

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Whether there is such a file or folder."""
        fs, inner = self._below(path)
        return bool(fs.exists(inner, **kwargs))

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Makes a folder, where there are any."""
        fs, inner = self._below(path)
        fs.mkdir(inner, create_parents=create_parents, **kwargs)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Makes folders, where there are any."""
        fs, inner = self._below(path)
        fs.makedirs(inner, exist_ok=exist_ok)

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Renames what is below."""
        (fs, first), (_, second) = self._below(path1), self._below(path2)
        fs.mv(first, second, **kwargs)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Removes what is below."""
        for each in path if isinstance(path, list) else [path]:
            fs, inner = self._below(each)
            fs.rm(inner, recursive=recursive, maxdepth=maxdepth)

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        """Opens a file to read it, or to write it whole.

        Raises:
            ValueError: another mode than ``rb`` and ``wb``.
            CorruptDataError: what is stored is damaged.
        """
        if mode not in ("rb", "wb"):
            raise ValueError(f"mode={mode!r}: 'rb' or 'wb' expected")
        fs, inner = self._below(path)
        if mode == "wb":
            return _Written(fs, inner)
        file = fs.open(inner, "rb")
        head = file.read(16)
        file.seek(0)
        if not _core.is_s4w(head):
            return file
        with file:
            return io.BufferedReader(_Restored(file.read(), str(path)), 1 << 20)


class _Written(io.BytesIO):
    """A file that is written: it is stored when it is closed, whole or not at all."""

    def __init__(self, fs: Any, path: str) -> None:
        super().__init__()
        self._fs, self._path, self._failed = fs, path, False

    def __exit__(self, *exception: object) -> None:
        self._failed = exception[0] is not None
        self.close()

    def close(self) -> None:
        """Stores it, unless an error ended the ``with`` that it was opened in."""
        if self.closed:
            return
        values = bytearray(self.getbuffer())
        super().close()
        if self._failed:
            return
        stored = compress(values)
        with self._fs.open(self._path, "wb") as file:
            file.write(values if stored is None else stored)


class _Span(NamedTuple):
    """Bytes of the file, and where they are: a number of a tensor, and the first byte there."""

    start: int
    end: int
    tensor: int
    first: int


def compress(values: bytearray) -> bytes | None:
    """The ``.s4w`` file for files of `torch.save` in a row; ``None`` if there are no tensors in it."""
    found = find_storages(values)
    if not found:
        return None
    memory = torch.frombuffer(values, dtype=torch.uint8)
    start, at = memory.data_ptr(), 0
    spans: list[tuple[int, int]] = []
    sources = []
    rest = bytearray()
    for offset, size, dtype in found:
        if offset < at:
            continue  # No file of `torch.save` has storages that overlap.
        number = len(spans)
        rest += values[at:offset]
        spans.append((offset, size))
        name, width = dtype_name(dtype), dtype.itemsize
        shape = (size // width,)
        sources.append((f"{number}", name, shape, start + offset, size))
        at = offset + size
    rest += values[at:]
    kept = torch.frombuffer(rest, dtype=torch.uint8) if rest else torch.empty(0, dtype=torch.uint8)
    sources.append((_REST, "uint8", (len(rest),), kept.data_ptr() if rest else 0, len(rest)))
    stream = io.BytesIO()
    writer = _core.Writer(None, None, stream, "balanced", None, {})
    try:
        writer.write(sources, b"", None)
        text = json.dumps({"version": 1, "bytes": len(values), "tensors": spans})
        writer.finish(None, {_BLOB: text.encode()}, {})
    except BaseException:
        writer.abort()
        raise
    return stream.getvalue()


class _Restored(io.RawIOBase):
    """A file as it was, of which only what is read is decoded."""

    def __init__(self, data: bytes, name: str) -> None:
        self._reader = _core.Reader(None, None, data, None, {})
        tensors = self._reader.tensors()
        try:
            said = json.loads(self._reader.blob(_BLOB))
            self._size, places = int(said["bytes"]), [(int(a), int(n)) for a, n in said["tensors"]]
            ends = said["version"] == 1 and len(places) == len(tensors) - 1
            self._spans = _spans(places, self._size, [t[3] for t in tensors]) if ends else []
        except (KeyError, ValueError, TypeError) as error:
            raise CorruptDataError(
                f"{name}: no file that was written through s4w://: {error}"
            ) from error
        if not ends:
            raise CorruptDataError(f"{name}: no file that was written through s4w://")
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise ValueError(f"a place before the start: {start + offset}")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        size = max(0, min(len(view), self._size - self._at))
        if not size:
            return 0
        values = bytearray(size)
        memory = torch.frombuffer(values, dtype=torch.uint8).data_ptr()
        end = self._at + size
        for span in self._spans:
            start, stop = max(span.start, self._at), min(span.end, end)
            if start < stop:
                first = span.first + start - span.start
                part = [(first, first + stop - start)]
                length = span.first + span.end - span.start
                place = (memory + start - self._at, stop - start)
                self._reader.read_view(span.tensor, (0, 1, (length,)), part, place)
        view[:size] = values
        self._at = end
        return size


def _spans(places: list[tuple[int, int]], size: int, stored: list[int]) -> list[_Span]:
    """Where the bytes of a file are. Raises `ValueError` if the places are not those of the tensors."""
    spans, at, rest = [], 0, 0
    for number, (offset, length) in enumerate(places):
        if offset < at or length != stored[number]:
            raise ValueError("tensors at other places")
        spans.append(_Span(at, offset, len(places), rest))
        spans.append(_Span(offset, offset + length, number, 0))
        rest, at = rest + offset - at, offset + length
    spans.append(_Span(at, size, len(places), rest))
    if size < at or rest + size - at != stored[len(places)]:
        raise ValueError("bytes are missing")
    return [span for span in spans if span.start < span.end]
