"""torch_checkpointing: a storage that writes its `torch.save` files as ``.s4w``.

::

    from s4weights.adapters.torch_checkpointing import S4StorageConfig

    manager = CheckpointManager.Config(..., storage_config=S4StorageConfig()).build()
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import _core
from .._load import load
from .._save import save
from ._common import require

require("torch_checkpointing", "0.1.1", "torch_checkpointing")

import torch  # noqa: E402
from torch_checkpointing.storage.base_storage import (  # noqa: E402
    ReadArgs,
    Storage,
    StorageConfig,
)
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig  # noqa: E402

__all__ = ["S4Storage", "S4StorageConfig"]

#: The most files that are kept in memory in the form that torch_checkpointing reads, until it has
#: read them: it asks for the size first, and may read parts through a stream each.
_KEPT = 2

#: A file as it is at the moment: path, size, and time of the last change (0 if it is not known).
_Key = tuple[str, int, int]


def _local() -> StorageConfig:
    # With direct I/O it cannot write to ext4.
    return LocalFileSystemStorageConfig(use_direct_io=False)


@dataclass
class S4StorageConfig(StorageConfig):  # type: ignore[misc]
    """The configuration of an `S4Storage`. It can be pickled.

    Attributes:
        inner: the storage that contains the files.
        preset: as in `s4weights.save`.
        threads: as in `s4weights.save`.
        weights_only: refuse files that contain more than tensors and plain values.
            torch_checkpointing itself would run their code.
    """

    inner: StorageConfig = field(default_factory=_local)
    preset: str = "balanced"
    threads: int | None = None
    weights_only: bool = True

    def create_storage(self) -> S4Storage:
        """Called by torch_checkpointing, in each process."""
        return S4Storage(self)


class S4Storage(Storage):  # type: ignore[misc]
    """Wraps another storage and writes the output of `torch.save` as ``.s4w`` files. Files in other
    formats and existing files are not changed.
    """

    def __init__(self, config: S4StorageConfig) -> None:
        self._config = config
        self._inner = config.inner.create_storage()
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, _Kept] = OrderedDict()

    def get_write_stream(self, path: Path, data: object) -> io.IOBase:
        """Write an object. The stream discards its `torch.save` form, which is written to it."""
        how = {"preset": self._config.preset, "threads": self._config.threads}
        return _Sink(self._inner.stream_write(path), data, how)

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        """A file in the form that torch_checkpointing reads."""
        found = self._as_torch(path)
        if found is None:
            stream: io.RawIOBase = self._inner.stream_read(path, read_args)
            return stream
        key, kept = found
        return _Stream(kept.data, lambda nbytes: self._was_read(key, kept, nbytes))  # type: ignore[return-value]

    def getsize(self, path: Path) -> int:
        """The size of a file in the form that torch_checkpointing reads."""
        found = self._as_torch(path)
        return self._inner.getsize(path) if found is None else len(found[1].data)

    def _was_read(self, key: _Key, kept: _Kept, nbytes: int) -> None:
        """Drop a file once as many bytes were read as it has."""
        with self._lock:
            kept.unread -= nbytes
            if kept.unread <= 0 and self._kept.get(key) is kept:
                del self._kept[key]

    def _key(self, path: Path) -> _Key:
        changed = 0
        with contextlib.suppress(OSError, ValueError):  # The inner storage may not be local.
            changed = os.stat(self._inner.remap_path(path)).st_mtime_ns
        return str(path), self._inner.getsize(path), changed

    def _as_torch(self, path: Path) -> tuple[_Key, _Kept] | None:
        """The bytes that `torch.save` would write for a ``.s4w`` file, or ``None`` for other files."""
        key = self._key(path)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return key, self._kept[key]
        with self._inner.stream_read(path, ReadArgs(pre_read_full_file=False)) as stream:
            head = stream.read(16)
        if not _core.is_s4w(head):
            return None
        with self._inner.stream_read(path, ReadArgs(pre_read_full_file=True)) as stream:
            loaded = load(stream, weights_only=self._config.weights_only)
        out = io.BytesIO()
        torch.save(loaded, out)
        with self._lock:
            self._kept[key] = kept = _Kept(out.getvalue())
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return key, kept

    def stream_write(self, path: Path) -> io.IOBase:
        """A stream that writes bytes as they are."""
        stream: io.IOBase = self._inner.stream_write(path)
        return stream

    def write(self, path: Path, data: Any) -> None:
        """Write bytes as they are."""
        self._inner.write(path, data)

    def delete(self, path: Path) -> None:
        """Delete a file."""
        self._inner.delete(path)

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Make a folder."""
        self._inner.mkdir(path, recursive)

    def rmdir(self, path: Path) -> None:
        """Delete a folder."""
        self._inner.rmdir(path)

    def rename(
        self,
        src_path: Path,
        dst_path: Path,
        is_directory: bool = False,
        background_cleanup: bool = False,
    ) -> None:
        """Rename, as the inner storage does: this commits a checkpoint."""
        self._inner.rename(src_path, dst_path, is_directory, background_cleanup)

    def ls(self, path: Path) -> list[str]:
        """The names in a folder."""
        return [*self._inner.ls(path)]

    def exists(self, path: Path) -> bool:
        """Whether there is such a file or folder."""
        return bool(self._inner.exists(path))

    def isdir(self, path: Path) -> bool:
        """Whether there is such a folder."""
        return bool(self._inner.isdir(path))

    def remap_path(self, path: Path) -> str:
        """The inner storage's name for a path."""
        return str(self._inner.remap_path(path))


class _Kept:
    """A file in the form that torch_checkpointing reads, and how many bytes it has yet to read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.unread = len(data)


class _Stream(io.BytesIO):
    """Reads bytes; when it is closed, it reports how many were read."""

    def __init__(self, data: bytes, report: Callable[[int], None]) -> None:
        super().__init__(data)
        self._report: Callable[[int], None] | None = report
        self._count = 0

    def read(self, size: int | None = -1, /) -> bytes:
        found = super().read(size)
        self._count += len(found)
        return found

    def readinto(self, buffer: Any, /) -> int:
        size = super().readinto(buffer)
        self._count += size
        return size

    def close(self) -> None:
        report, self._report = self._report, None
        super().close()
        if report is not None:
            report(self._count)


class _Sink(io.IOBase):
    """Writes the object when it is entered, and discards what `torch.save` writes."""

    def __init__(self, target: Any, data: object, how: dict[str, Any]) -> None:
        self._target, self._data, self._how = target, data, how

    def __enter__(self) -> _Sink:
        with self._target as target:
            save(self._data, target, **self._how)
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes
