"""The pickle form: PyTorch's own pickle stream, with the storages taken out.

The stream is what `torch.save` writes as ``data.pkl``: each storage is replaced by the persistent
id ``("storage", storage type, key, location, elements)``, and the key is the index of a tensor of
the file. It is loaded by PyTorch's restricted unpickler or, with ``weights_only=False``, by a full
one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import pickle
import reprlib
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from ._collection import without_collection
from ._errors import CorruptDataError, S4Error, UnsafeLoadError, UnsupportedFormatError
from ._explain import find_refused, is_broken
from ._names import walk_tensors
from ._storages import (
    Hint,
    StorageReader,
    StorageWriter,
    covering_shape,
    is_of_signal,
    is_strided,
    require_storage,
)
from ._unsavable import refused_tensor

if TYPE_CHECKING:
    import torch

#: Modules from which classes have moved since old files were written.
_MOVED = {"torch.tensor": "torch._tensor"}

#: The most characters of a message of PyTorch's, and of a name in the file, that errors quote.
MAX_SAID = 2000

_short_repr = reprlib.Repr()
_short_repr.maxstring = _short_repr.maxother = 200


def dump(obj: object, storages: StorageWriter, pickle_module: Any, protocol: int) -> bytes:
    """The pickle stream of an object; its storages are added to ``storages``."""
    import torch

    storage_types = (torch.storage.TypedStorage, torch.storage.UntypedStorage)

    # Only the garbage collector can free a class, so it must not keep the storages alive.
    noted = [(storages, without_collection(lambda: _noted(obj)))]

    class Pickler(pickle_module.Pickler):  # type: ignore[misc]
        def persistent_id(self, item: Any) -> tuple[Any, ...] | None:
            # Called for every object, so the usual answer, "no", must be quick.
            return _storage_id(item, *noted[0]) if isinstance(item, storage_types) else None

    stream = io.BytesIO()
    try:
        # Thousands of small objects are made, none of them garbage.
        without_collection(lambda: Pickler(stream, protocol=protocol).dump(obj))
    except (S4Error, OSError, MemoryError):
        raise
    except Exception as error:
        if named := refused_tensor(obj, protocol, error):
            raise named from error
        raise
    finally:
        noted.clear()
    return stream.getvalue()


def _storage_id(item: Any, storages: StorageWriter, noted: _Noted) -> tuple[Any, ...]:
    import torch

    if isinstance(item, torch.storage.TypedStorage):
        storage, dtype = item._untyped_storage, item.dtype
        kind = getattr(torch, item._pickle_storage_type())
        elements = item._size()
    else:
        storage, dtype = item, torch.uint8
        kind = torch.serialization.normalize_storage_type(type(item))
        elements = item.nbytes()
    if storage._cdata in noted.freed:
        raise S4Error(noted.freed[storage._cdata][0])

    def hint() -> Hint:
        # Raises for storages that stand for values elsewhere: not only once the file is being written.
        storage.data_ptr()
        return noted.hints.get(storage._cdata) or Hint("storage", dtype, None)

    number = storages.number(storage, hint)
    location = torch.serialization.location_tag(storage)
    return ("storage", kind, str(number), location, elements)


class _Noted(NamedTuple):
    """Facts about storages, by identity, that are known before the object is pickled."""

    hints: dict[int, Hint]
    #: Why storages cannot be saved, with tensors that keep them alive. Pickling may not reach them.
    freed: dict[int, tuple[str, torch.Tensor]]


def _noted(obj: object) -> _Noted:
    import torch

    noted = _Noted({}, {})
    plain = (torch.Tensor, torch.nn.Parameter)
    with torch._C.DisableTorchFunctionSubclass():
        for path, tensor in walk_tensors(obj):
            try:
                key, shape = tensor.untyped_storage()._cdata, covering_shape(tensor)
            except Exception:  # A subclass without a storage: pickling knows what to do with it.
                continue
            # One that covers its storage lies within it.
            if shape is None and type(tensor) in plain and is_strided(tensor):
                try:
                    require_storage(tensor, path)
                except S4Error as error:
                    noted.freed.setdefault(key, (str(error), tensor))
            if key not in noted.hints:
                noted.hints[key] = Hint(path, tensor.dtype, shape)
    return noted


class StandIns:
    """Builds other tensors in place of quantized and nested ones, which PyTorch cannot have on the
    device "meta". As a context manager it does so on this thread.
    """

    def __init__(self) -> None:
        # With the tensors themselves, so that no other storage gets the identity of theirs.
        self._made: dict[int, tuple[str, torch.Tensor]] = {}
        self._mode: Any = None

    def kind(self, tensor: torch.Tensor) -> str | None:
        """The kind of tensor that it stands in for, or ``None`` if it is the saved one itself."""
        made = self._made.get(tensor.untyped_storage()._cdata)
        return None if made is None else made[0]

    def make(self, kind: str, shape: Any) -> torch.Tensor:
        """A stand-in for a tensor of this kind."""
        import torch

        tensor = torch.empty(shape, device="meta").as_subclass(_stand_in())
        self._made[tensor.untyped_storage()._cdata] = kind, tensor
        return tensor

    def __enter__(self) -> StandIns:
        self._mode = _stand_in_mode()(self)
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._mode.__exit__(*exception)
        self._mode = None


@functools.cache
def _stand_in() -> Any:
    import torch

    class StandIn(torch.Tensor):  # type: ignore[misc,unused-ignore]
        def set_(self, *args: Any, **kwargs: Any) -> Any:
            """PyTorch would give it a storage of another dtype."""
            return self

    return StandIn


@functools.cache
def _stand_in_mode() -> Any:
    import torch
    from torch.overrides import TorchFunctionMode

    quantized = (torch._empty_affine_quantized, torch._empty_per_channel_affine_quantized)

    class Mode(TorchFunctionMode):  # type: ignore[misc,unused-ignore]
        def __init__(self, stand_ins: StandIns) -> None:
            super().__init__()
            self._stand_ins = stand_ins

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func in quantized:
                return self._stand_ins.make("quantized", args[0])
            if func == torch._nested_view_from_buffer:
                return self._stand_ins.make("a nested tensor", 0)
            return func(*args, **(kwargs or {}))

    return Mode


@functools.cache
def _sparse_mode() -> Any:
    import torch
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):  # type: ignore[misc,unused-ignore]
        """On the device "meta", compressed sparse tensors must be without values, as those are that
        ``Tensor.to("meta")`` makes.
        """

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.sparse_compressed_tensor and args[2].device.type == "meta":
                compressed, plain, values, *rest = args
                none = (*[slice(None)] * (compressed.dim() - 1), slice(0, 0))
                args = (compressed, plain[none], values[none], *rest)
            return func(*args, **(kwargs or {}))

    return Mode


def load(
    stream: bytes,
    storages: StorageReader,
    map_location: Any,
    pickle_module: Any,
    pickle_load_args: dict[str, Any],
    stand_ins: StandIns | None = None,
) -> Any:
    """The object that a stream describes; ``pickle_module`` ``None`` means ``weights_only``.
    With ``stand_ins`` its tensors have no values, on the device "meta".
    """
    import torch

    unpickler = _unpickler(stream, pickle_module, pickle_load_args)
    unpickler.persistent_load = persistent = _PersistentLoad(storages)
    tls = torch.serialization._serialization_tls
    tls.map_location = map_location
    unchecked = _unchecked_sparse_tensors()
    before = len(unchecked)
    try:
        sparse = stand_ins is None and b"_rebuild_sparse_tensor" in stream
        with stand_ins or (_sparse_mode()() if sparse else contextlib.nullcontext()):
            obj = unpickler.load()
        storages.check_sizes()
        if stand_ins is None:
            # Without values there is nothing to check.
            unchecked[before:] = [t for t in unchecked[before:] if t.device.type != "meta"]
            _validate_sparse(weights_only=pickle_module is None)
    except (S4Error, OSError, MemoryError):
        raise
    except Exception as error:
        # An exception of a function of the caller's is passed on as it is.
        if persistent.raised is error or storages.is_of_caller(error):
            raise
        broken = is_broken(stream)
        if stand_ins is not None and not broken and _wants_values(error):
            raise UnsupportedFormatError(
                "a tensor in the object cannot be rebuilt without its values; use `load`, which reads them: "
                f"{_short_repr.repr(error)}"
            ) from error
        if pickle_module is None and not broken:
            if isinstance(error, pickle.UnpicklingError):
                raise _unsafe(stream, error) from None
            # If the user allowed no globals, only PyTorch's own functions were called, with
            # arguments from the stream: the stream is at fault.
            broken = not torch._weights_only_unpickler._get_user_allowed_globals()
        if broken:
            message = f"corrupt data (pickle): {_short_repr.repr(error)}"
            raise CorruptDataError(message) from error
        raise
    finally:
        persistent.raised = None  # It refers to the frames, and so to all that was loaded.
        tls.map_location = None
        # PyTorch would check tensors that are left here with the next object of this thread.
        del unchecked[before:]
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
        #: The exception raised while placing a storage, which may call a function of the caller's.
        self.raised: BaseException | None = None

    def __call__(self, persistent_id: Any) -> Any:
        import torch

        try:
            kind, storage_type, key, location, elements = persistent_id
            if type(elements) is not int or elements < 0:
                raise ValueError("elements")
            number = int(key)
            dtype = torch.uint8 if storage_type is torch.UntypedStorage else storage_type.dtype
            nbytes = elements * dtype.itemsize
        except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
            if self._storages.is_of_caller(error):
                raise
            what = _short_repr.repr(persistent_id)
            raise CorruptDataError(f"corrupt data (pickle): {what}") from error
        stored = self._storages.info(number)[3]
        if kind != "storage" or not nbytes <= stored < nbytes + dtype.itemsize:
            what = _short_repr.repr(persistent_id)
            raise CorruptDataError(f"corrupt data (pickle): {what} of a storage of {stored} bytes")
        try:
            storage = self._storages.get(number, location)
        except BaseException as error:
            self.raised = error
            raise
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _validate_sparse(weights_only: bool) -> None:
    import torch

    validate = torch._utils._validate_loaded_sparse_tensors
    if "weights_only" in inspect.signature(validate).parameters:
        validate(weights_only=weights_only)
    else:
        validate()


def _unchecked_sparse_tensors() -> list[Any]:
    """PyTorch's list of this thread's sparse tensors that are still to be checked."""
    import torch

    get = getattr(torch._utils, "_get_sparse_tensors_to_validate", None)
    found: list[Any] = [] if get is None else get()
    return found


def _wants_values(error: Exception) -> bool:
    """Whether PyTorch raised an error because a tensor is on the device "meta"."""
    return isinstance(error, NotImplementedError) or "meta tensor" in str(error)


def unsafe_globals(stream: bytes) -> list[str]:
    """The globals of a stream that the restricted unpickler does not allow, sorted."""
    from torch import _weights_only_unpickler as unpickler

    allowed = unpickler._get_allowed_globals().keys() | unpickler._get_user_allowed_globals().keys()
    try:
        needed = unpickler.get_globals_in_pkl(io.BytesIO(stream))
    except Exception as error:
        if is_of_signal(error):
            raise
        raise CorruptDataError(f"corrupt data (pickle): {_short_repr.repr(error)}") from error
    return sorted(set(needed) - allowed)


def _unsafe(stream: bytes, error: pickle.UnpicklingError) -> UnsafeLoadError:
    refused = find_refused(stream)
    said = str(error)
    said = said if len(said) <= MAX_SAID else f"{said[:MAX_SAID]}..."
    if not refused:
        lines = ["Weights only load failed. weights_only=True cannot load this.", *_advice(said)]
        return UnsafeLoadError("\n".join([*lines, f"PyTorch's unpickler says: {said}"]))
    key_path, name = refused[0]
    place = f"`{key_path}`" if key_path else "the saved object"
    shown = name if len(name) <= MAX_SAID else f"{name[:MAX_SAID]}..."
    # Programs look for the words with which PyTorch's message begins.
    lines = [
        f"Weights only load failed. weights_only=True: {place} needs `{shown}`, "
        "which is not an allowed global."
    ]
    module = "torch.distributed.tensor"
    if name.startswith(f"{module}.") and module not in sys.modules:
        lines.append(f"  to allow it, `import {module}` before loading; nothing else is needed")
    lines += [f"  also `{path}` needs `{other[:MAX_SAID]}`" for path, other in refused[1:8]]
    lines += [*_advice(said), f"PyTorch's unpickler says: {said}"]
    return UnsafeLoadError("\n".join(lines), key_path=key_path, global_name=name)


def _advice(said: str) -> list[str]:
    """Advice after a refusal. Not every refusal is about a global that could be allowed."""
    if "Unsupported operand" in said:
        return [
            "If you trust the file, load it with weights_only=False, which can run any code in the file,",
            "and save it again with pickle_protocol=2. Or, in PyTorch's words: please file an issue "
            "with the following so that we can make `weights_only=True` compatible with your use case.",
        ]
    if "is blocked" in said:
        return [
            "It cannot be allowed. If you trust the file,",
            "load it with weights_only=False, which can run any code in the file.",
        ]
    return [
        "If you trust the file, allow them with torch.serialization.add_safe_globals([...]) or",
        "load it with weights_only=False, which can run any code in the file.",
    ]
