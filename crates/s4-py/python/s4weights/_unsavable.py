"""Finds the tensor that keeps an object from being pickled, to name it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from ._errors import UnsupportedFormatError
from ._names import walk_tensors
from ._storages import is_of_signal

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
    if type(tensor).__reduce_ex__ is not torch.Tensor.__reduce_ex__:
        if not type(tensor).__module__.startswith("torch."):
            return None
    try:
        tensor.__reduce_ex__(protocol)
        tensor.untyped_storage().data_ptr()
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
