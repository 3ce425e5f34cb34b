"""The fsspec protocol ``s4w``: files written by `torch.save`, or several such files concatenated,
are stored as ``.s4w`` files and read back in their original form.

``s4w://runs/a`` and ``s4w://s3://bucket/run`` add compression to ``runs/a`` and
``s3://bucket/run``: a file written through them is stored as a ``.s4w`` file if it contains tensors
saved by `torch.save`. Other files, including those written by other programs, are not changed.
`torch.distributed.checkpoint` accepts such a URL::

    dcp.save(state, checkpoint_id="s4w:///runs/a/step-1000")
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import fsspec
import torch
from fsspec.core import url_to_fs

from . import _core
from ._errors import CorruptDataError, S4Error
from ._storages import dtype_name
from ._torch_zip import find_storages

#: The blob that describes the original file.
_BLOB = "stream"
#: The name of the stored tensor that holds the bytes between tensors.
_REST = "rest"


class S4wFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """A file system that adds compression to another one."""

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
        """List a folder of the underlying file system, with the stored sizes."""
        fs, inner = self._below(path)
        return fs.ls(inner, detail=detail, **kwargs)

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Return the underlying file system's information on a file, with the stored size."""
        fs, inner = self._below(path)
        return dict(fs.info(inner, **kwargs))

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Return whether a file or folder exists."""
        fs, inner = self._below(path)
        return bool(fs.exists(inner, **kwargs))

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Make a folder, if the underlying file system has folders."""
        fs, inner = self._below(path)
        fs.mkdir(inner, create_parents=create_parents, **kwargs)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make folders, if the underlying file system has folders."""
        fs, inner = self._below(path)
        fs.makedirs(inner, exist_ok=exist_ok)

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Rename a file or folder of the underlying file system."""
        (fs, first), (_, second) = self._below(path1), self._below(path2)
        fs.mv(first, second, **kwargs)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove files or folders of the underlying file system."""
        for each in path if isinstance(path, list) else [path]:
            fs, inner = self._below(each)
            fs.rm(inner, recursive=recursive, maxdepth=maxdepth)

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        """Open a file for reading, or for writing it as a whole.

        Raises:
            ValueError: the mode is neither ``rb`` nor ``wb``.
            CorruptDataError: the stored file is damaged.
        """
        if mode not in ("rb", "wb"):
            raise ValueError(f"mode={mode!r}: expected 'rb' or 'wb'")
        fs, inner = self._below(path)
        if mode == "wb":
            return _Written(fs, inner)
        file = fs.open(inner, "rb")
        head = file.read(16)
        file.seek(0)
        if not _core.is_s4w(head):
            return file
        with file:
            data = file.read()
        restored = _restore(data, str(path))
        if restored is None:
            return _Plain(data)
        return _Buffered(restored, 1 << 20)


class _Plain(io.BytesIO):
    """A file as it is stored."""

    @property
    def size(self) -> int:
        """The length of the file."""
        return self.getbuffer().nbytes


class _Buffered(io.BufferedReader):
    """A file that is decoded."""

    @property
    def size(self) -> int:
        """The length of the file."""
        at = self.tell()
        size = self.seek(0, io.SEEK_END)
        self.seek(at)
        return size


class _Written(io.BytesIO):
    """A file that is being written. It is stored completely or not at all, when it is closed. It is
    not stored if it is garbage-collected without being closed, since an exception may have ended
    the writing.
    """

    def __init__(self, fs: Any, path: str) -> None:
        super().__init__()
        self._fs, self._path, self._failed = fs, path, False

    def __del__(self) -> None:
        # The base class would close it here, which stores it.
        if not self.closed and self.tell():
            message = f"{self._path}: nothing was stored because the file was not closed"
            warnings.warn(message, RuntimeWarning, stacklevel=2)

    def __exit__(self, *exception: object) -> None:
        self._failed = exception[0] is not None
        self.close()

    def close(self) -> None:
        """Store the file, unless an exception ended the ``with`` block that it was opened in."""
        if self.closed:
            return
        values = bytearray(self.getbuffer())
        super().close()
        if self._failed:
            return
        stored = compress(values)
        if stored is None and not _is_read_as_it_is(values):
            stored = _wrap(values, [])
        with self._fs.open(self._path, "wb") as file:
            file.write(values if stored is None else stored)


class _Span(NamedTuple):
    """A range of bytes of the file, and where it is stored: tensor index, and first byte there."""

    start: int
    end: int
    tensor: int
    first: int


def compress(values: bytearray) -> bytes | None:
    """The ``.s4w`` file for concatenated files of `torch.save`, or ``None`` if it has no tensors."""
    found = find_storages(values)
    return _wrap(values, found) if found else None


def _wrap(values: bytearray, found: Sequence[tuple[int, int, torch.dtype]]) -> bytes:
    """The ``.s4w`` file for a file with tensors at these places."""
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
    kept = torch.frombuffer(rest, dtype=torch.uint8) if rest else None
    start = 0 if kept is None else kept.data_ptr()
    sources.append((_REST, "uint8", (len(rest),), start, len(rest)))
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


def _is_read_as_it_is(values: bytearray) -> bool:
    """Whether a reader takes the bytes for neither a file compressed here nor a damaged one."""
    if not _core.is_s4w(bytes(values[:16])):
        return True
    try:
        return _restore(bytes(values), "") is None
    except S4Error:
        return False


def _restore(data: bytes, name: str) -> _Restored | None:
    """The file that was compressed, or ``None`` if this is a ``.s4w`` file that somebody else wrote."""
    reader = _core.Reader(None, None, data, None, {})
    try:
        text = reader.blob(_BLOB)
    except KeyError:
        return None
    return _Restored(reader, text, name)


class _Restored(io.RawIOBase):
    """A file in its original form. Only the parts that are read are decoded."""

    def __init__(self, reader: _core.Reader, text: bytes, name: str) -> None:
        self._reader = reader
        tensors = reader.tensors()
        try:
            said = json.loads(text)
            self._size, places = int(said["bytes"]), [(int(a), int(n)) for a, n in said["tensors"]]
            ends = said["version"] == 1 and len(places) == len(tensors) - 1
            self._spans = _spans(places, self._size, [t[3] for t in tensors]) if ends else []
        except (KeyError, ValueError, TypeError) as error:
            raise CorruptDataError(
                f"{name}: not written through s4w://: {error}"
            ) from error
        if not ends:
            raise CorruptDataError(f"{name}: not written through s4w://")
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
            raise ValueError(f"cannot seek to the negative position {start + offset}")
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
    """The stored ranges of a file's bytes. Raises `ValueError` if ``places`` does not fit."""
    spans, at, rest = [], 0, 0
    for number, (offset, length) in enumerate(places):
        if offset < at or length != stored[number]:
            raise ValueError("tensors are at other offsets")
        spans.append(_Span(at, offset, len(places), rest))
        spans.append(_Span(offset, offset + length, number, 0))
        rest, at = rest + offset - at, offset + length
    spans.append(_Span(at, size, len(places), rest))
    if size < at or rest + size - at != stored[len(places)]:
        raise ValueError("bytes are missing")
    return [span for span in spans if span.start < span.end]
