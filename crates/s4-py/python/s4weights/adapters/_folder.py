"""Saves a folder of files as one checkpoint of a store.

Tensors in ``.safetensors`` files, ``.s4w`` files and files of `torch.save` are stored as tensors,
so that they are compressed as such and become deltas. Other files, and those that hold more than
tensors and plain values, are stored as bytes. Nothing is unpickled that ``weights_only=True`` does
not allow.
"""

from __future__ import annotations

import os
import pickle
import shutil
import uuid
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

from .._errors import CorruptDataError, UnsafeLoadError, UnsupportedFormatError
from .._load import load
from .._save import save
from .._store import CheckpointStore

_KEY = "s4weights.folder"
#: The version of the form in which folders are stored.
_VERSION = 1


def save_folder(
    store: CheckpointStore,
    folder: str | os.PathLike[str],
    step: int,
    *,
    blocking: bool = True,
    **how: Any,
) -> Any:
    """Saves a folder through `CheckpointStore.save_checkpoint`, with the arguments ``how``. Its
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
    """Writes a folder that `save_folder` saved. It appears whole, and replaces an existing one."""
    where = f"{store.url}: step {'newest' if step is None else step}"
    packed = store.load_checkpoint(step, "cpu")
    target = Path(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    part.mkdir()
    try:
        _unpack(packed, part, where)
        if target.exists():
            shutil.rmtree(target)
        part.rename(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _pack(folder: Path) -> dict[str, Any]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files:
        raise FileNotFoundError(f"{folder}: there are no files to save")
    return {_KEY: _VERSION, **{p.relative_to(folder).as_posix(): _pack_file(p) for p in files}}


def _unpack(packed: Any, folder: Path, where: str) -> None:
    if not isinstance(packed, dict) or _KEY not in packed:
        raise UnsupportedFormatError(f"{where} was not saved from a folder: use load_checkpoint")
    if packed[_KEY] != _VERSION:
        raise UnsupportedFormatError(f"{where}: folder format version {packed[_KEY]!r} is unknown")
    for name, kept in packed.items():
        if name == _KEY:
            continue
        _check_name(name, where)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _unpack_file(kept, path, f"{where}: {name!r}")


def _check_name(name: str, where: str) -> None:
    """Raises for names of files that would not be below the folder."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or ":" in parts[0]:
        raise CorruptDataError(f"{where}: {name!r} is not a name of a file in a folder")


def _pack_file(path: Path) -> dict[str, Any]:
    import torch

    tensors = _read_safetensors(path) if path.suffix == ".safetensors" else None
    if tensors is not None:
        return tensors
    if path.suffix == ".s4w":
        try:
            return {"s4w": load(path, "cpu", weights_only=True)}
        except UnsafeLoadError:
            pass
    elif _is_torch_file(path):
        try:
            return {"torch": torch.load(path, "cpu", weights_only=True)}
        except (pickle.UnpicklingError, RuntimeError):
            pass  # More than tensors and plain values: stored as bytes.
    raw = bytearray(path.read_bytes())
    empty = torch.empty(0, dtype=torch.uint8, device="cpu")
    return {"bytes": torch.frombuffer(raw, dtype=torch.uint8) if raw else empty}


def _unpack_file(kept: Any, path: Path, where: str) -> None:
    import torch

    form = sorted(kept) if isinstance(kept, dict) else kept
    if form == ["metadata", "safetensors"]:
        from safetensors.torch import save_file

        save_file(kept["safetensors"], path, kept["metadata"])
    elif form == ["torch"]:
        torch.save(kept["torch"], path)
    elif form == ["s4w"]:
        save(kept["s4w"], path)
    elif form == ["bytes"]:
        path.write_bytes(bytes(kept["bytes"].numpy()))
    else:
        raise CorruptDataError(f"{where}: stored in an unknown form: {form!r}")


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
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as file:
        return any(name.endswith("/data.pkl") for name in file.namelist())
