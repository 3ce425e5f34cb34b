"""Planners that pickle as little as they can, and unpickle nothing that runs code."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType

from ._errors import CorruptDataError, UnsafeLoadError
from ._load import load

#: What a value that is stored as JSON begins with; no file of `torch.save` does.
_JSON = b"s4w-json\n"
_DEEPEST = 64


class SavePlanner(dcp.DefaultSavePlanner):  # type: ignore[misc]
    """DCP's default planner, which stores values that are not tensors as JSON where that gives back the
    same: ``None``, truth values, integers, finite floats, texts, and lists and dicts of them with texts
    as keys. All others are pickled, as by the default planner. It takes `LoadPlanner` to load them.
    """

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """What is stored of a value."""
        if write_item.type == WriteItemType.BYTE_IO and _is_plain(object):
            text = json.dumps(object, separators=(",", ":"), allow_nan=False)
            return io.BytesIO(_JSON + text.encode())
        return super().transform_object(write_item, object)


class LoadPlanner(dcp.DefaultLoadPlanner):  # type: ignore[misc]
    """DCP's default planner, which runs no code of a checkpoint: values that are not tensors are
    loaded as by ``torch.load(weights_only=True)``, `io.BytesIO` included, those of `SavePlanner` from
    JSON.
    """

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Puts a value where it belongs."""
        fqn = read_item.dest_index.fqn
        loaded = _from_json(fqn, value) if _is_json(value) else _from_pickle(fqn, value)
        plain = io.BytesIO()
        torch.save(loaded, plain)
        plain.seek(0)
        # What it loads there is what was just made here.
        super().load_bytes(read_item, plain)


def _is_plain(obj: Any, depth: int = 0) -> bool:
    """Whether JSON gives back the same: types, order and every bit."""
    if depth > _DEEPEST:
        return False
    if obj is None or type(obj) is bool:
        return True
    if type(obj) is int:
        return obj.bit_length() <= 64  # Python refuses to read very long ones.
    if type(obj) is float:
        return math.isfinite(obj)
    if type(obj) is str:
        return obj.isascii() or obj.encode("utf-8", "replace").decode() == obj
    if type(obj) is list:
        return all(_is_plain(item, depth + 1) for item in obj)
    if type(obj) is dict:
        return all(
            type(key) is str and _is_plain(key) and _is_plain(item, depth + 1)
            for key, item in obj.items()
        )
    return False


def _is_json(value: io.BytesIO) -> bool:
    return value.getbuffer()[: len(_JSON)] == _JSON


def _from_json(fqn: str, value: io.BytesIO) -> Any:
    try:
        return json.loads(bytes(value.getbuffer()[len(_JSON) :]))
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"{fqn!r}: {error}") from error


def _from_pickle(fqn: str, value: io.BytesIO) -> Any:
    try:
        # Trainers keep bytes in streams. A pickle calls `bytes` for none, and could for any number.
        with torch.serialization.safe_globals([io.BytesIO, (_no_bytes, "builtins.bytes")]):
            # Under `patch` it is no file of PyTorch's.
            return load(value, weights_only=True)
    except Exception as error:
        raise UnsafeLoadError(f"Weights only load failed: {fqn!r}: {error}") from None


def _no_bytes() -> bytes:
    return b""
