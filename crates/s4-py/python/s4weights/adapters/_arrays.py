"""Converts NumPy arrays, including those with dtypes of `ml_dtypes`, to tensors and back."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401  For the names of its dtypes.
import numpy as np
import torch

from .._errors import UnsupportedFormatError


def to_torch(values: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a copy of an array as a tensor. If PyTorch does not have the dtype, return its bytes,
    with one more dimension.

    Raises:
        UnsupportedFormatError: an array of strings, bytes, records or objects.
    """
    values = np.array(values, order="C")
    if values.dtype.name == "bfloat16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    try:
        return torch.from_numpy(values)
    except TypeError:
        if not _has_name(values.dtype):
            raise UnsupportedFormatError(f"unsupported array dtype {values.dtype}: not numbers") from None
        raw = torch.frombuffer(bytearray(values.tobytes() or b"\0"), dtype=torch.uint8)
        return raw[: values.nbytes].clone().reshape(*values.shape, values.itemsize)


def _has_name(dtype: np.dtype[Any]) -> bool:
    """Whether `to_numpy` can make arrays of a dtype, given its name, from their bytes."""
    try:
        return not dtype.hasobject and np.dtype(dtype.name) == dtype
    except TypeError:
        return False


def to_numpy(tensor: torch.Tensor, dtype: str) -> np.ndarray[Any, Any]:
    """The array of this dtype that `to_torch` made a tensor of."""
    wanted = np.dtype(dtype)
    shape = tensor.shape
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    elif tensor.dtype == torch.uint8 and wanted != np.uint8:
        shape = shape[:-1]
    values: np.ndarray[Any, Any] = tensor.contiguous().numpy().reshape(-1).view(wanted)
    return values.reshape(tuple(shape))
