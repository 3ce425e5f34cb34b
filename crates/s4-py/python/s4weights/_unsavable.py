"""Finds the tensor that keeps an object from being saved, to name it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ._errors import UnsupportedFormatError
from ._names import walk_tensors
from ._storages import dtype_name, is_of_signal

if TYPE_CHECKING:
    import torch

#: The most characters of a message of PyTorch's that the error quotes.
_MAX_SAID = 200


def refused_tensor(obj: object, protocol: int, error: Exception) -> UnsupportedFormatError | None:
    """The error that names the tensor at fault, if pickling an object failed because PyTorch cannot pickle one of its
    tensors; ``None`` if it failed for another reason, such as a class of the caller's.
    """
    if is_of_signal(error):
        return None
    try:
        # Some tensors refuse every question, and all that is asked for here is their error.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for path, tensor in walk_tensors(obj, whole=True):
                if why := _refusal(tensor, protocol, error):
                    where = f"`{path}`" if path else "the tensor"
                    return UnsupportedFormatError(f"cannot save {where}: {why}")
    except Exception as another:
        if is_of_signal(another):
            raise
    return None


def _refusal(tensor: torch.Tensor, protocol: int, error: Exception) -> str | None:
    """Why PyTorch cannot pickle a tensor; ``None`` if it can, or if that is not what ``error`` says."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(tensor, FakeTensor):
        return "a fake tensor, which has no values"
    # Other classes pickle themselves, and their errors are for whoever wrote them.
    kind = type(tensor)
    if kind.__reduce_ex__ is not torch.Tensor.__reduce_ex__ and not kind.__module__.startswith("torch."):
        return None
    try:
        tensor.__reduce_ex__(protocol)
        tensor.untyped_storage().data_ptr()
        tensor._typed_storage()._pickle_storage_type()
    except Exception as again:
        if type(again) is type(error) and str(again) == str(error):
            said = (str(again).strip().split("\n", 1)[0] or repr(again))[:_MAX_SAID]
            return f"PyTorch cannot pickle {_kind(tensor)}: {said}"
        if is_of_signal(again):
            raise
    return None


def _kind(tensor: torch.Tensor) -> str:
    import torch

    if tensor.is_nested:
        return "this nested tensor"
    layout = "" if tensor.layout is torch.strided else f" of layout {tensor.layout}"
    return f"a {type(tensor).__name__} of {tensor.dtype}{layout}"


def require_all_pieces(state: Mapping[str, Any]) -> None:
    """`require_pieces` for all tensors of a flat state, of which there may be hundreds of thousands."""
    import torch

    known = set()
    # What is asked for here needs no code of the tensors' classes.
    with torch._C.DisableTorchFunctionSubclass():
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                continue
            kind = type(value), value.dtype, torch._C._dispatch_keys(value).raw_repr()
            if kind not in known:
                require_pieces(value, repr(name))
                if _is_plain(value):
                    known.add(kind)


def require_pieces(tensor: torch.Tensor, where: str) -> None:
    """Raise `UnsupportedFormatError` for a tensor that `torch.distributed.checkpoint` cannot take apart, or whose
    pieces the format cannot hold. Its own errors name no tensor.
    """
    if why := odd_kind(tensor):
        raise UnsupportedFormatError(f"{where}: {why}")
    if dtype_name(tensor.dtype) == "bytes":
        raise UnsupportedFormatError(f"{where}: the format does not support {tensor.dtype}")
    import torch

    try:
        torch._utils._element_size(tensor.dtype)
    except TypeError as error:
        what = f"{where}: torch.distributed.checkpoint does not know the size of {tensor.dtype}"
        raise UnsupportedFormatError(what) from error


def odd_kind(tensor: torch.Tensor) -> str | None:
    """What keeps a tensor from being copied and cut like others; ``None`` if it seems to be a usual one."""
    import torch

    if torch.nn.parameter.is_lazy(tensor):
        return "a tensor that is not initialized"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else f"of layout {str(tensor.layout).removeprefix('torch.')}"
        return f"expected a strided tensor, not one that is {kind}"
    return valueless_kind(tensor)


def valueless_kind(tensor: torch.Tensor) -> str | None:
    """The kind of a tensor that only stands for values, and has none in its memory; ``None`` for others."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(tensor, FakeTensor):
        return "a tensor without values, such as one on `meta`"
    if _is_plain(tensor) and not tensor.is_meta:
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor
        # After the function that `torch.func.grad` was given has ended, what is left of its wrapper has values.
        stands = (wrapped(tensor) and wrapped(tensor.detach())) or torch._is_functional_tensor(tensor)
        if stands or tensor._is_zerotensor():
            return "a tensor without memory of its own"
    return None


def _is_plain(tensor: torch.Tensor) -> bool:
    import torch

    return type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
