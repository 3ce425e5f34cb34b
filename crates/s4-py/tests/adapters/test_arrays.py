"""NumPy arrays that adapters keep as tensors."""

from __future__ import annotations

from typing import Any

import pytest

import s4weights

pytest.importorskip("ml_dtypes", reason="needs ml_dtypes")

import numpy as np

from s4weights.adapters._arrays import to_numpy, to_torch


@pytest.mark.parametrize(
    "dtype", ["float32", "bool", "uint32", "datetime64[ns]", "bfloat16", "float8_e4m3", "int4"]
)
def test_numbers_come_back(dtype: str) -> None:
    values = np.arange(6).reshape(2, 3).astype(np.int8).astype(np.dtype(dtype))
    found = to_numpy(to_torch(values), values.dtype.name)
    assert found.dtype == values.dtype and found.tolist() == values.tolist()


@pytest.mark.parametrize(
    "values",
    [
        np.array(["a", "bc"]),
        np.array([b"a", b"bc"]),
        np.zeros(2, [("x", "f4"), ("y", "i8")]),
        np.zeros(2, "V8"),
        np.array([None, {}], object),
    ],
)
def test_what_could_not_come_back_is_refused(values: Any) -> None:
    with pytest.raises(s4weights.UnsupportedFormatError, match=r"dtype .*: not numbers"):
        to_torch(values)
