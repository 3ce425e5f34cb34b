"""Reads PyTorch's own files for the command line, without running pickled code, and writes them."""

from __future__ import annotations

import contextlib
import os
import pickle
import pickletools
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

from . import _core
from ._errors import CorruptDataError, StorageError, UnsafeLoadError, UnsupportedFormatError
from ._explain import find_refused, is_broken
from ._sources import _HEAD, _is_safetensors

#: The pickles in a file of `torch.save`'s old format, up to the object: a magic number, a version,
#: properties of the machine, and the object.
_OLD_PICKLES = 4
#: The most characters of a message of PyTorch's that errors quote.
_MAX_SAID = 300
#: What messages contain when PyTorch's writer could not write.
_WRITE_ERRORS = ("enforce fail", "PytorchStreamWriter", "unexpected pos")


def read_file(path: str) -> Any:
    """What `torch.save` wrote: tensors and plain values, and nothing else.

    Raises `UnsafeLoadError` for a sound file that holds more, `UnsupportedFormatError` for one of
    another format, and `CorruptDataError`.
    """
    if _is_program(path):
        what = (
            f"{path}: a TorchScript program, not a file of torch.save. In Python, "
            f"torch.jit.load({path!r}).state_dict() gives its tensors, for s4weights.save"
        )
        raise UnsupportedFormatError(what)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # whatever PyTorch's readers raise
        raise _explained(path, error) from error


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
        return UnsupportedFormatError(f"{path}: a .s4w file already, whatever its name")
    if _is_safetensors(head):
        what = f"{path}: a safetensors file: give it a name that ends with .safetensors"
        return UnsupportedFormatError(what)
    said = f"{path}: damaged, or not a file of torch.save: {brief(error)}"
    try:
        stream = _pickle_of(path)
    except (RuntimeError, ValueError):
        return CorruptDataError(said)
    if stream is None:
        return UnsupportedFormatError(f"{path}: a pickle, but not one that torch.save wrote")
    if is_broken(stream) or not isinstance(error, pickle.UnpicklingError):
        return CorruptDataError(said)
    place, name = next(iter(find_refused(stream)), (None, None))
    return UnsafeLoadError(brief(error), key_path=place, global_name=name)


def _pickle_of(path: str) -> bytes | None:
    """The pickled object of a file of `torch.save`; ``None`` if another program pickled it. Raises
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
    """What PyTorch's message says about the file, without its advice to callers of `torch.load`."""
    # The message of some errors, such as a `KeyError`, is just a number.
    text = str(error).strip() if " " in str(error) else repr(error)
    _, found, rest = text.partition("WeightsUnpickler error: ")
    line = (rest if found else text).strip().split("\n", 1)[0].split(". ", 1)[0].strip()
    return line if len(line) <= _MAX_SAID else f"{line[:_MAX_SAID]}..."


def write_file(state: object, target: str) -> None:
    """As `torch.save`, but under a temporary name first: see `replacing`."""
    with replacing(target) as file:
        try:
            torch.save(state, file)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # whatever PyTorch's writers raise
            if isinstance(error, RuntimeError) and any(what in str(error) for what in _WRITE_ERRORS):
                raise StorageError(f"{target}: cannot write: {brief(error)}") from error
            what = f"{target}: PyTorch cannot write this to a file of its own: {brief(error)}"
            raise UnsupportedFormatError(what) from error


@contextlib.contextmanager
def replacing(target: str) -> Iterator[IO[bytes]]:
    """A new file that takes the place of ``target`` if no exception occurs, once it is on disk. A
    link stays a link, and a file that replaces another gets its permissions and, where the system
    allows it, its owner.
    """
    path = Path(os.path.realpath(target))
    # A name that nobody can guess, and a file that nobody has made: in a folder that others may
    # write to, a link of that name could lead elsewhere.
    temporary = path.with_name(f".{path.name[:60]}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            old = path.stat()
            if hasattr(os, "chown"):
                with contextlib.suppress(OSError):
                    os.chown(temporary, old.st_uid, old.st_gid)
            shutil.copymode(path, temporary)
        temporary.replace(path)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(error.errno, error.strerror, target) from error
    finally:
        temporary.unlink(missing_ok=True)
