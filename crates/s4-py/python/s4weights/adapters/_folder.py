"""Saves a folder of files as one checkpoint of a store.

Tensors in ``.safetensors`` files, ``.s4w`` files and files written by `torch.save` are stored as
tensors, so that they are compressed as tensors and can be stored as deltas. Other files, and those
that contain more than tensors and plain values or cannot be read, are stored as bytes. Unpickling
is limited to what ``weights_only=True`` allows. Links are followed, and their targets are stored.
The only permission that is preserved is whether a file is executable.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from .._errors import CorruptDataError, S4Error, UnsupportedFormatError
from .._load import load
from .._save import save
from .._sources import is_url, open_source, path_of_url, require_s4w
from .._store import CheckpointStore
from ._common import load_by_id

_KEY = "s4weights.folder"
#: The version of the form in which folders are stored; and the one of folders that hold empty folders or
#: executable files, which has a dict in place of the version.
_VERSION, _VERSION_2 = 1, 2

#: The last record of a ZIP archive without a comment: its first bytes, and its size.
_ZIP_END, _ZIP_END_SIZE = b"PK\5\6", 22


def save_folder(
    store: CheckpointStore,
    folder: str | os.PathLike[str],
    step: int,
    *,
    blocking: bool = True,
    **how: Any,
) -> Any:
    """Save a folder through `CheckpointStore.save_checkpoint`, with the arguments ``how``. Its
    files may be changed or deleted as soon as this returns.
    """
    packed = _pack(Path(folder))
    if blocking:
        return store.save_checkpoint(packed, step, **how)
    # Nobody else has these tensors, so they need no copies.
    return store.save_checkpoint(packed, step, blocking=False, stage="lazy", **how)


def restore_folder(
    store: CheckpointStore, folder: str | os.PathLike[str], step: int | str | None = None
) -> None:
    """Write a folder saved by `save_folder`. It appears complete, and replaces an existing one."""
    where = f"{store.url}: step {'newest' if step is None else step}"
    place = path_of_url(store.url) if is_url(store.url) else store.url
    if place and "://" not in place and Path(os.path.realpath(place)).is_relative_to(os.path.realpath(folder)):
        raise ValueError(f"{os.fspath(folder)!r}: the store is in this folder, which would be replaced")
    packed = load_by_id(store, step) if isinstance(step, str) else store.load_checkpoint(step, "cpu")
    write_folder(packed, folder, where)


def write_folder(packed: Any, folder: str | os.PathLike[str], where: str) -> None:
    """Write the folder of a loaded checkpoint, like `restore_folder`. ``where`` is for messages."""
    # `a/..` would replace the folder that `a` is in, with everything else in it.
    if Path(folder).name in ("", ".."):
        raise ValueError(f"{os.fspath(folder)!r}: expected a path that ends with the folder's name")
    # A link stays a link.
    target = Path(os.path.realpath(folder))
    if target in (place := Path(os.path.realpath(Path(folder).parent)), *place.parents):
        raise ValueError(f"{os.fspath(folder)!r}: a link to a folder that it is in itself")
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    unique = f".{target.name}.{uuid.uuid4().hex}"
    part, old = target.with_name(unique), target.with_name(f"{unique}.old")
    part.mkdir()
    try:
        _unpack(packed, part, where)
        if target.exists():
            # Whatever fails, one of the two is there.
            target.rename(old)
        part.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        # An interrupt may come when the new folder is in its place.
        shutil.rmtree(part if part.exists() else old, ignore_errors=True)
        raise
    if old.exists():
        shutil.rmtree(old)


def _pack(folder: Path) -> dict[str, Any]:
    files: dict[str, Path] = {}
    empty: list[str] = []
    for path in _walk(folder, frozenset()):
        name = path.relative_to(folder).as_posix()
        # Names that cannot be restored must not be saved.
        _check_name(name, str(folder), ValueError)
        if path.is_dir():
            empty.append(name)
        else:
            files[name] = path
    if not files:
        raise FileNotFoundError(f"{folder}: no files to save")
    about: Any = _VERSION
    executable = [n for n, path in files.items() if os.name == "posix" and path.stat().st_mode & 0o100]
    if empty or executable:
        about = {"version": _VERSION_2, "folders": empty, "executable": executable}
    # No file is found under a name that begins so; it leads to the same one.
    return {
        _KEY: about,
        **{f"./{name}" if name == _KEY else name: _pack_file(path) for name, path in files.items()},
    }


def _walk(folder: Path, above: frozenset[str]) -> Iterator[Path]:
    """The files below a folder, and its empty folders, in order."""
    above = above | {os.path.realpath(folder)}
    for path in sorted(folder.iterdir()):
        if path.is_file():
            yield path
        elif path.is_dir() and os.path.realpath(path) not in above:
            if any(path.iterdir()):
                yield from _walk(path, above)
            else:
                yield path
        else:
            what = "it is a broken link, a link to a folder that contains it, a pipe or a device"
            warnings.warn(f"{path}: not saved: {what}", stacklevel=2)


def _unpack(packed: Any, folder: Path, where: str) -> None:
    if not isinstance(packed, dict) or _KEY not in packed:
        raise UnsupportedFormatError(f"{where} was not saved from a folder: use load_checkpoint")
    about = packed[_KEY]
    folders, executable = _more(about, where) if isinstance(about, dict) else ([], [])
    if not isinstance(about, dict) and about != _VERSION:
        raise UnsupportedFormatError(f"{where}: folder format version {about!r} is unknown")
    for name, kept in packed.items():
        if name == _KEY:
            continue
        _check_name(name, where)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _unpack_file(kept, path, f"{where}: {name!r}")
    for name in folders:
        _check_name(name, where)
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in executable:
        _check_name(name, where)
        path = folder / name
        if not path.is_file():
            raise CorruptDataError(f"{where}: {name!r} is not a file")
        # Executable for those who may read it.
        mode = path.stat().st_mode
        path.chmod(mode | (mode & 0o444) >> 2)


def _more(about: dict[str, Any], where: str) -> tuple[list[str], list[str]]:
    """The empty folders and the executable files."""
    if about.get("version") != _VERSION_2:
        version = about.get("version")
        raise UnsupportedFormatError(f"{where}: folder format version {version!r} is unknown")
    lists = [about.get("folders"), about.get("executable")]
    if not all(isinstance(names, list) and all(type(n) is str for n in names) for names in lists):
        raise CorruptDataError(f"{where}: the lists of folders and executable files are invalid")
    return about["folders"], about["executable"]


def _check_name(name: str, where: str, kind: type[Exception] = CorruptDataError) -> None:
    """Raise for names of files that would not be below the folder, or are not text."""
    parts = PurePosixPath(name).parts
    # On other systems these are characters as any others.
    leads_elsewhere = os.name == "nt" and any(c in name for c in "\\:")
    if not parts or name.startswith("/") or ".." in parts or "\0" in name or leads_elsewhere:
        raise kind(f"{where}: {name!r} is not a valid name of a file in the folder")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise kind(f"{where}: the name {name!r} cannot be encoded as UTF-8") from None


def _pack_file(path: Path) -> dict[str, Any]:
    import torch

    tensors = _read_safetensors(path) if path.suffix == ".safetensors" else None
    if tensors is not None:
        return tensors
    if path.suffix == ".s4w":
        kept = _read_s4w(path)
        if kept is not None:
            return kept
    elif _is_torch_file(path):
        try:
            return {"torch": torch.load(path, "cpu", weights_only=True)}
        except (OSError, MemoryError):
            raise
        except Exception:  # whatever PyTorch's readers raise
            pass  # More than tensors and plain values, or damaged: stored as bytes.
    raw = bytearray(path.read_bytes())
    empty = torch.empty(0, dtype=torch.uint8, device="cpu")
    return {"bytes": torch.frombuffer(raw, dtype=torch.uint8) if raw else empty}


def _read_s4w(path: Path) -> dict[str, Any] | None:
    """The object and metadata of a ``.s4w`` file, or ``None`` if it holds more, or cannot be read."""
    try:
        reader = require_s4w(open_source(str(path), None, None))
        if any(_has_blob(reader, name) for name in ("dcp", "stream")):
            return None
        metadata = reader.metadata()
        kept = {"s4w": load(path, "cpu", weights_only=True)}
    except FileNotFoundError:
        raise
    except (S4Error, OSError, ValueError, RuntimeError):
        return None
    return {**kept, "metadata": metadata} if metadata else kept


def _has_blob(reader: Any, name: str) -> bool:
    try:
        reader.blob(name)
    except KeyError:
        return False
    return True


def _unpack_file(kept: Any, path: Path, where: str) -> None:
    import torch

    form = sorted(kept) if isinstance(kept, dict) else kept
    if form == ["metadata", "safetensors"]:
        from safetensors.torch import save_file

        save_file(kept["safetensors"], path, kept["metadata"])
    elif form == ["torch"]:
        torch.save(kept["torch"], path)
    elif form in (["s4w"], ["metadata", "s4w"]):
        save(kept["s4w"], path, metadata=kept.get("metadata"))
    elif form == ["bytes"]:
        path.write_bytes(bytes(kept["bytes"].numpy()))
    else:
        raise CorruptDataError(f"{where}: unknown storage form {form!r}")


def _read_safetensors(path: Path) -> dict[str, Any] | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            # Cloned, since the tensors may be views of one mapping of the file.
            tensors = {name: file.get_tensor(name).clone() for name in names}
            return {"safetensors": tensors, "metadata": file.metadata()}
    except (SafetensorError, KeyError, AttributeError):
        return None  # A dtype that PyTorch or this version does not have.


def _is_torch_file(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _ZIP_END_SIZE))
        # Bytes after the archive would be lost.
        if not file.read().startswith(_ZIP_END) or not zipfile.is_zipfile(path):
            return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/data.pkl") for name in archive.namelist())
