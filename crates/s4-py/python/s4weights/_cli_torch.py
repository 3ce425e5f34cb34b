"""Reads PyTorch's own files for the command line, without running pickled code, and writes them."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import pickletools
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

from . import _core
from ._errors import (
    ConflictError,
    CorruptDataError,
    StorageError,
    UnsafeLoadError,
    UnsupportedFormatError,
)
from ._explain import find_refused, is_broken
from ._sources import _HEAD, _is_safetensors

#: The pickles in a file of `torch.save`'s old format, up to the object: a magic number, a version,
#: properties of the machine, and the object.
_OLD_PICKLES = 4
#: The most characters of a message of PyTorch's that errors quote.
_MAX_SAID = 300
#: The most bytes of a file's name that are in that of its temporary file: file systems allow 255.
_LONGEST_STEM = 200
#: Texts in PyTorch's messages that mean that its writer could not write.
_WRITE_ERRORS = ("enforce fail", "PytorchStreamWriter", "unexpected pos")
#: What its messages contain when there was no memory for a tensor of so many bytes.
_NO_MEMORY = re.compile(r"DefaultCPUAllocator: .*?you tried to allocate (\d+) bytes")


def read_file(path: str) -> Any:
    """Return the object in a file written by `torch.save`, if it contains only tensors and plain values.

    Raises `UnsafeLoadError` for a valid file that contains more, `UnsupportedFormatError` for a
    file in another format, and `CorruptDataError`.
    """
    if _is_program(path):
        what = (
            f"{path} is a TorchScript program, not a file written by torch.save. In Python, use "
            f"s4weights.save(torch.jit.load({path!r}).state_dict(), ...) to save its tensors"
        )
        raise UnsupportedFormatError(what)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # whatever PyTorch's readers raise
        if is_no_memory(error, os.path.getsize(path)):
            raise MemoryError from error
        # They look for the end of a file that is cut off at places that it cannot have.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise _about(path, error) from error
        raise _explained(path, error) from error


def is_no_memory(error: BaseException, most: int | None = None) -> bool:
    """Whether PyTorch found no memory for a tensor, which it reports as any other error. A file of ``most`` bytes that
    names a larger one is damaged.
    """
    found = _NO_MEMORY.search(str(error)) if isinstance(error, RuntimeError) else None
    return found is not None and (most is None or int(found[1]) <= most)


def _about(path: str, error: OSError) -> StorageError:
    """The error, with the name of the file that it is about."""
    if isinstance(error, StorageError):
        return error
    if error.errno is None:
        return StorageError(f"{path}: {error}")
    return StorageError(error.errno, error.strerror, path)


def _is_program(path: str) -> bool:
    with open(path, "rb") as file:
        if file.read(2) != b"PK":
            return False
    try:
        return "constants.pkl" in torch._C.PyTorchFileReader(path).get_all_records()
    except RuntimeError:
        return False


def _explained(path: str, error: Exception) -> Exception:
    """The error for a file that PyTorch could not load: it is damaged, or of another kind."""
    with open(path, "rb") as file:
        head = file.read(_HEAD)
    if _core.is_s4w(head):
        return UnsupportedFormatError(f"{path} is already a .s4w file, despite its name")
    if _is_safetensors(head):
        what = f"{path} is a safetensors file: rename it so that its name ends with .safetensors"
        return UnsupportedFormatError(what)
    said = f"{path}: damaged, or not written by torch.save: {brief(error)}"
    try:
        stream = _pickle_of(path)
    except (RuntimeError, ValueError):
        return CorruptDataError(said)
    if stream is None:
        return UnsupportedFormatError(f"{path} is a pickle, but was not written by torch.save")
    if is_broken(stream) or not isinstance(error, pickle.UnpicklingError):
        return CorruptDataError(said)
    place, name = next(iter(find_refused(stream)), (None, None))
    return UnsafeLoadError(brief(error), key_path=place, global_name=name)


def _pickle_of(path: str) -> bytes | None:
    """The pickled object of a file of `torch.save`, or ``None`` if another program pickled it. Raises
    `RuntimeError` or `ValueError` if it cannot be found.
    """
    with open(path, "rb") as file:
        if file.read(2) == b"PK":
            return bytes(torch._C.PyTorchFileReader(path).get_record("data.pkl"))
        file.seek(0)
        is_ours = False
        for _, value, _ in pickletools.genops(file):
            is_ours = is_ours or value == torch.serialization.MAGIC_NUMBER
        if not is_ours:
            return None
        start = 0
        for _ in range(_OLD_PICKLES - 1):
            start = file.tell()
            for _ in pickletools.genops(file):
                pass
        length = file.tell() - start
        file.seek(start)
        return file.read(length)


def brief(error: BaseException) -> str:
    """PyTorch's message about the file, without its advice to callers of `torch.load`."""
    # The message of some errors, such as a `KeyError`, is just a number.
    text = str(error).strip() if " " in str(error) else repr(error)
    _, found, rest = text.partition("WeightsUnpickler error: ")
    line = (rest if found else text).strip().split("\n", 1)[0].split(". ", 1)[0].strip()
    return line if len(line) <= _MAX_SAID else f"{line[:_MAX_SAID]}..."


def write_file(state: object, target: str, *, force: bool) -> None:
    """Like `torch.save`, but under a temporary name first: see `replacing`."""
    with replacing(target, force=force) as file:
        try:
            torch.save(state, file)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # whatever PyTorch's writers raise
            if is_no_memory(error):
                raise MemoryError from error
            if isinstance(error, RuntimeError) and any(what in str(error) for what in _WRITE_ERRORS):
                raise StorageError(f"{target}: cannot write: {brief(error)}") from error
            what = f"{target}: PyTorch cannot write this object with torch.save: {brief(error)}"
            raise UnsupportedFormatError(what) from error


@contextlib.contextmanager
def replacing(target: str, *, force: bool) -> Iterator[IO[bytes]]:
    """Context manager for a new file that replaces ``target`` once it is on disk, if no exception occurs.

    A link stays a link, and a file that replaces another gets its permissions and, where the system
    allows it, its owner. A read-only file is not replaced; pipes and devices are written to
    directly. Without ``force``, no file is replaced, even if it appears in the meantime.
    """
    try:
        # The target of `/dev/stdout` may have no path.
        real = target if _is_stream(target) else os.path.realpath(target)
        with _in_place_of(Path(real), force) as file:
            yield file
    except FileExistsError as error:
        raise ConflictError(f"{target} exists already; --force replaces it") from error
    except OSError as error:
        raise _about(target, error) from error


@contextlib.contextmanager
def _in_place_of(path: Path, force: bool) -> Iterator[IO[bytes]]:
    old = path.stat() if path.exists() else None
    if old is not None and not stat.S_ISREG(old.st_mode):
        with open(path, "wb") as file:
            yield file
        return
    # Renaming over it would succeed.
    if old is not None and not _is_writable(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    # A name that nobody can guess, and a file that nobody has made: in a folder that others may
    # write to, a link of that name could lead elsewhere.
    stem = path.name.encode(errors="ignore")[:_LONGEST_STEM].decode(errors="ignore")
    temporary = path.with_name(f".{stem}.{secrets.token_hex(8)}.tmp")
    # Until it has the permissions of the other one, it is for this user alone.
    mode = 0o666 if old is None else 0o600
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    descriptor = os.open(temporary, flags, mode)
    try:
        with open(descriptor, "wb") as file:
            if old is not None:
                _take_over(file, old)
            yield file
            file.flush()
            os.fsync(file.fileno())
        if force:
            temporary.replace(path)
        else:
            _rename_new(temporary, path)
        _sync_folder(path.parent)
    finally:
        # If this fails, too, the first error says more.
        with contextlib.suppress(OSError):
            temporary.unlink()


def _rename_new(temporary: Path, path: Path) -> None:
    """Give a file a name that no file has. The caller removes the temporary name."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except (OSError, AttributeError):
        # A file system without second names.
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
        temporary.replace(path)


def _sync_folder(folder: Path) -> None:
    """Make new names in a folder durable, as the native writer does."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        # One that may not be listed is left to the system.
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_stream(path: str) -> bool:
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _is_writable(path: Path) -> bool:
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _take_over(file: IO[bytes], old: os.stat_result) -> None:
    """Give a new file the owner and permissions of the one that it replaces."""
    if not hasattr(os, "fchown"):
        return
    try:
        os.fchown(file.fileno(), old.st_uid, old.st_gid)
    except OSError:
        # Only root may give files away, but anyone may choose one of their own groups.
        with contextlib.suppress(OSError):
            os.fchown(file.fileno(), -1, old.st_gid)
    os.fchmod(file.fileno(), old.st_mode & 0o777)
