"""Compares objects bit for bit: types, values, storages, and which parts are shared."""

from __future__ import annotations

import io
import math
import struct
from collections import deque
from enum import Enum
from pathlib import Path
from typing import Any

import torch

import s4weights

#: Metrics that are too long for a store, which only the store finds out, at the end of a save.
TOO_LONG = {"x" * 65_450: 0.0}


def storage_bytes(storage: torch.UntypedStorage) -> bytes:
    """All bytes of a storage."""
    if storage.nbytes() == 0 or storage.device.type == "meta":
        return b""
    tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return bytes(tensor.cpu().numpy())


def through_torch(obj: Any, **load_arguments: Any) -> Any:
    """The object after `torch.save` and `torch.load`."""
    stream = io.BytesIO()
    torch.save(obj, stream)
    stream.seek(0)
    return torch.load(stream, **{"weights_only": False, **load_arguments})


def through_s4(obj: Any, path: Path, **load_arguments: Any) -> Any:
    """The object after `s4weights.save` and `s4weights.load`."""
    s4weights.save(obj, path)
    return s4weights.load(path, **{"weights_only": False, **load_arguments})


def assert_identical(a: Any, b: Any) -> None:
    """Fails unless two objects are the same bit for bit and share the same parts."""
    _Comparison().compare(a, b, "object")


class _Comparison:
    def __init__(self) -> None:
        self._there: dict[int, Any] = {}
        self._back: dict[int, Any] = {}
        self._storages: dict[int, int] = {}
        self._storages_back: dict[int, int] = {}

    def compare(self, a: Any, b: Any, path: str) -> None:
        assert type(a) is type(b), f"{path}: {type(a)} and {type(b)}"
        if isinstance(
            a, (type(None), bool, int, str, bytes, Enum, type, torch.dtype, torch.device)
        ):
            assert a == b, path
        elif isinstance(a, float):
            assert struct.pack("d", a) == struct.pack("d", b) or (
                type(a) is not float and math.isnan(a) and math.isnan(b)
            ), path
        elif isinstance(a, complex):
            assert struct.pack("dd", a.real, a.imag) == struct.pack("dd", b.real, b.imag), path
        elif self._is_new(a, b, path):
            self._compare_parts(a, b, path)

    def _is_new(self, a: Any, b: Any, path: str) -> bool:
        """Whether a pair is met for the first time. Fails if either was met without the other."""
        if isinstance(a, (tuple, frozenset)):
            return True
        assert (id(a) in self._there) == (id(b) in self._back), f"{path}: shared in one of them"
        if id(a) in self._there:
            assert self._there[id(a)] is b, f"{path}: shared with something else"
            return False
        self._there[id(a)], self._back[id(b)] = b, a
        return True

    def _compare_parts(self, a: Any, b: Any, path: str) -> None:
        if isinstance(a, torch.Tensor):
            self._compare_tensors(a, b, path)
        elif isinstance(a, torch.UntypedStorage):
            self._compare_storages(a, b, path)
        elif isinstance(a, torch.storage.TypedStorage):
            assert a.dtype == b.dtype and a._size() == b._size(), path
            self._compare_storages(a._untyped_storage, b._untyped_storage, path)
        elif isinstance(a, dict):
            assert len(a) == len(b), path
            pairs = zip(a.items(), b.items(), strict=True)
            for i, ((key_a, value_a), (key_b, value_b)) in enumerate(pairs):
                name = key_a if type(key_a) is str else i
                self.compare(key_a, key_b, f"{path} key {name}")
                self.compare(value_a, value_b, f"{path}[{name}]")
        elif isinstance(a, (list, tuple, deque)):
            assert len(a) == len(b), path
            for i, (item_a, item_b) in enumerate(zip(a, b, strict=True)):
                self.compare(item_a, item_b, f"{path}[{i}]")
        elif isinstance(a, (set, frozenset, bytearray)):
            assert a == b or all(isinstance(item, torch.Tensor) for item in a), path
        elif type(a).__module__ == "numpy":
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), path
        if hasattr(a, "__dict__"):
            self._compare_parts(vars(a), vars(b), f"{path}.__dict__")

    def _compare_tensors(self, a: torch.Tensor, b: torch.Tensor, path: str) -> None:
        for what in ("dtype", "device", "layout", "requires_grad", "is_quantized", "is_nested"):
            assert getattr(a, what) == getattr(b, what), f"{path}: {what}"
        if a.is_nested:
            self._compare_tensors(a._nested_tensor_size(), b._nested_tensor_size(), path)
            self._compare_tensors(a.values(), b.values(), path)
            return
        assert a.shape == b.shape, path
        assert a.is_conj() == b.is_conj() and a.is_neg() == b.is_neg(), path
        if a.layout is torch.sparse_coo:
            assert a.is_coalesced() == b.is_coalesced(), path
            self._compare_tensors(a._indices(), b._indices(), f"{path}.indices")
            self._compare_tensors(a._values(), b._values(), f"{path}.values")
        elif a.layout in (torch.sparse_csr, torch.sparse_bsr):
            for part in ("crow_indices", "col_indices", "values"):
                self._compare_tensors(getattr(a, part)(), getattr(b, part)(), f"{path}.{part}")
        elif a.layout in (torch.sparse_csc, torch.sparse_bsc):
            for part in ("ccol_indices", "row_indices", "values"):
                self._compare_tensors(getattr(a, part)(), getattr(b, part)(), f"{path}.{part}")
        elif a.device.type == "meta":
            assert a.stride() == b.stride(), path
        else:
            if a.is_quantized:
                assert a.qscheme() == b.qscheme(), path
            assert a.stride() == b.stride(), path
            assert a.storage_offset() == b.storage_offset(), path
            self._compare_storages(a.untyped_storage(), b.untyped_storage(), path)

    def _compare_storages(
        self, a: torch.UntypedStorage, b: torch.UntypedStorage, path: str
    ) -> None:
        first = a._cdata not in self._storages
        assert self._storages.setdefault(a._cdata, b._cdata) == b._cdata, f"{path}: storage"
        assert self._storages_back.setdefault(b._cdata, a._cdata) == a._cdata, f"{path}: storage"
        if first:
            assert a.nbytes() == b.nbytes(), path
            assert storage_bytes(a) == storage_bytes(b), f"{path}: bytes differ"
