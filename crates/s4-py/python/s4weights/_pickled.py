"""The pickle form: PyTorch's own pickle stream, with the storages taken out.

The stream is what `torch.save` writes as ``data.pkl``: each storage stands there as the persistent
id ``("storage", storage type, key, location, elements)``, and the key is the number of a tensor of
the file. It is loaded through PyTorch's restricted unpickler, or, with ``weights_only=False``, in
full.
"""

from __future__ import annotations

import inspect
import io
import pickle
from typing import Any

from ._errors import CorruptDataError, UnsafeLoadError
from ._explain import find_refused
from ._names import walk_tensors
from ._storages import (
    Hint,
    StorageReader,
    StorageWriter,
    covering_shape,
    is_strided,
    require_storage,
)

#: Modules that classes have moved from since files of theirs were written.
_MOVED = {"torch.tensor": "torch._tensor"}


def dump(obj: object, storages: StorageWriter, pickle_module: Any, protocol: int) -> bytes:
    """The pickle stream of an object; its storages are noted in ``storages``."""
    import torch

    hints = _hints(obj)

    storage_types = (torch.storage.TypedStorage, torch.storage.UntypedStorage)

    # A class is garbage that only a collection finds: it must not be what keeps the storages.
    noted = [storages]

    class Pickler(pickle_module.Pickler):  # type: ignore[misc]
        def persistent_id(self, item: Any) -> tuple[Any, ...] | None:
            # Asked for each and every object: the answer "no" is to be quick.
            return _storage_id(item, noted[0], hints) if isinstance(item, storage_types) else None

    stream = io.BytesIO()
    try:
        Pickler(stream, protocol=protocol).dump(obj)
    finally:
        noted.clear()
    return stream.getvalue()


def _storage_id(item: Any, storages: StorageWriter, hints: dict[int, Hint]) -> tuple[Any, ...]:
    import torch

    if isinstance(item, torch.storage.TypedStorage):
        storage, dtype = item._untyped_storage, item.dtype
        kind = getattr(torch, item._pickle_storage_type())
        elements = item._size()
    else:
        storage, dtype = item, torch.uint8
        kind = torch.serialization.normalize_storage_type(type(item))
        elements = item.nbytes()
    number = storages.number(
        storage, lambda: hints.get(storage._cdata) or Hint("storage", dtype, None)
    )
    location = torch.serialization.location_tag(storage)
    return ("storage", kind, str(number), location, elements)


def _hints(obj: object) -> dict[int, Hint]:
    import torch

    hints: dict[int, Hint] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for path, tensor in walk_tensors(obj):
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and is_strided(tensor):
                require_storage(tensor, path)
            try:
                key = tensor.untyped_storage()._cdata
                if key not in hints:
                    hints[key] = Hint(path, tensor.dtype, covering_shape(tensor))
            except Exception:  # A subclass without a storage: pickling knows what to do with it.
                continue
    return hints


def load(
    stream: bytes,
    storages: StorageReader,
    map_location: Any,
    pickle_module: Any,
    pickle_load_args: dict[str, Any],
) -> Any:
    """The object that a stream describes; ``pickle_module`` ``None`` means ``weights_only``."""
    import torch

    unpickler = _unpickler(stream, pickle_module, pickle_load_args)
    unpickler.persistent_load = _PersistentLoad(storages)
    tls = torch.serialization._serialization_tls
    tls.map_location = map_location
    try:
        obj = unpickler.load()
        storages.check_sizes()
        _validate_sparse(weights_only=pickle_module is None)
    except pickle.UnpicklingError as error:
        if pickle_module is not None:
            raise
        raise _unsafe(stream, error) from None
    finally:
        tls.map_location = None
    return obj


def _unpickler(stream: bytes, pickle_module: Any, arguments: dict[str, Any]) -> Any:
    import torch
    from torch import _weights_only_unpickler

    if pickle_module is None:
        restricted: Any = _weights_only_unpickler.Unpickler
        return restricted(io.BytesIO(stream), **arguments)

    class Unpickler(pickle_module.Unpickler):  # type: ignore[misc]
        def find_class(self, module: str, name: str) -> Any:
            if type(name) is str and "Storage" in name:
                try:
                    return torch.serialization.StorageType(name)
                except KeyError:
                    pass
            return super().find_class(_MOVED.get(module, module), name)

    return Unpickler(io.BytesIO(stream), **arguments)


class _PersistentLoad:
    """Turns a persistent id into a storage."""

    def __init__(self, storages: StorageReader) -> None:
        self._storages = storages

    def __call__(self, persistent_id: Any) -> Any:
        import torch

        try:
            kind, storage_type, key, location, elements = persistent_id
            number = int(key)
            dtype = torch.uint8 if storage_type is torch.UntypedStorage else storage_type.dtype
            nbytes = elements * dtype.itemsize
        except (TypeError, ValueError, AttributeError) as error:
            raise CorruptDataError(f"corrupt data (pickle): {persistent_id!r}") from error
        stored = self._storages.info(number)[3]
        if kind != "storage" or not nbytes <= stored < nbytes + dtype.itemsize:
            raise CorruptDataError(
                f"corrupt data (pickle): {persistent_id!r} of a storage of {stored} bytes"
            )
        storage = self._storages.get(number, location)
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _validate_sparse(weights_only: bool) -> None:
    import torch

    validate = torch._utils._validate_loaded_sparse_tensors
    if "weights_only" in inspect.signature(validate).parameters:
        validate(weights_only=weights_only)
    else:
        validate()


def _unsafe(stream: bytes, error: pickle.UnpicklingError) -> UnsafeLoadError:
    refused = find_refused(stream)
    if not refused:
        return UnsafeLoadError(f"weights_only=True: {error}")
    key_path, name = refused[0]
    place = f"`{key_path}`" if key_path else "the saved object itself"
    lines = [f"weights_only=True: {place} needs `{name}`, which is not an allowed global."]
    lines += [f"  also `{other_path}` needs `{other}`" for other_path, other in refused[1:8]]
    lines += [
        "If you trust the file, allow them with torch.serialization.add_safe_globals([...]) or",
        "load with weights_only=False, which can run any code that the file holds.",
        f"PyTorch's unpickler says: {error}",
    ]
    return UnsafeLoadError("\n".join(lines), key_path=key_path, global_name=name)
