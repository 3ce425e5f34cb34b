"""Exceptions, grouped by how the caller can handle them."""

from __future__ import annotations

import errno
import pickle
from typing import Any

__all__ = [
    "ConflictError",
    "CorruptDataError",
    "LimitError",
    "MismatchError",
    "NotFoundError",
    "S4Error",
    "StorageError",
    "UnsafeLoadError",
    "UnsupportedFormatError",
]


class S4Error(Exception):
    """Base class of the exceptions that s4weights defines."""


class CorruptDataError(S4Error, ValueError):
    """The data is inconsistent, truncated, or does not match a checksum: read another copy."""


class NotFoundError(S4Error, FileNotFoundError):
    """No file, object or checkpoint with this name exists."""


class UnsupportedFormatError(S4Error):
    """The data is valid, but this version or this machine cannot read or write it."""


class ConflictError(S4Error):
    """The state of the checkpoint store does not allow the operation. Nothing was changed.

    For example, a checkpoint is pinned, another checkpoint needs it, or another writer was faster.
    """


class LimitError(S4Error):
    """The operation would exceed a limit of the format or one set by the caller."""


class MismatchError(S4Error, ValueError):
    """The tensors to fill do not match those in the file: names, dtypes or shapes differ."""


class StorageError(S4Error, OSError):
    """The disk or the object store failed: it is full, read-only or unreachable, or access is denied.

    ``errno`` is the system's error number, if there is one: ``ENOSPC``, ``EROFS``, ``EACCES`` (also
    for an object store's 401 and 403), ``ECONNREFUSED``, ``ETIMEDOUT``. ``filename`` is the path or
    URL. ``cause`` is a keyword for programs, such as ``"Refused"``, ``"Dns"``, ``"Tls"``,
    ``"Timeout"``, ``"Permission"``, ``"NoSuchBucket"``, ``"Throttled"``, ``"DiskFull"``, and
    ``"Replaced"`` if another store was created in place of an open one. Each is ``None`` if it is
    unknown. Depending on ``errno``, the exception is also a `PermissionError`, an
    `IsADirectoryError` and so on.
    """

    cause: str | None = None

    def __new__(cls, *args: Any) -> StorageError:
        kind = _OF_ERRNO.get(args[0]) if cls is StorageError and len(args) > 1 else None
        return super().__new__(cls if kind is None else kind, *args)

    def __reduce__(self) -> Any:
        args = self.args if self.filename is None else (*self.args, self.filename)
        return StorageError, args, self.__dict__


def _with(kind: type[OSError]) -> type[StorageError]:
    return type(f"Storage{kind.__name__}", (StorageError, kind), {"__module__": __name__})


#: As for `OSError` itself: code that expects the system errors of `torch.save` keeps working.
_OF_ERRNO = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), _with(PermissionError)),
    errno.EISDIR: _with(IsADirectoryError),
    errno.ENOTDIR: _with(NotADirectoryError),
    errno.EEXIST: _with(FileExistsError),
    errno.ECONNREFUSED: _with(ConnectionRefusedError),
    errno.ETIMEDOUT: _with(TimeoutError),
}


class UnsafeLoadError(S4Error, pickle.UnpicklingError):
    """The saved object contains something that ``weights_only=True`` does not allow.

    ``key_path`` is its position in the saved object, and ``global_name`` is the class or function
    that would have been called. Either is ``None`` if it could not be determined.
    """

    def __init__(
        self, message: str, *, key_path: str | None = None, global_name: str | None = None
    ) -> None:
        super().__init__(message)
        self.key_path = key_path
        self.global_name = global_name
