"""Planners that avoid pickles where possible, and never run pickled code."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem, WriteItemType

from ._errors import CorruptDataError, UnsafeLoadError
from ._load import load
from ._unsavable import require_all_pieces

#: Prefix of values that are stored as JSON; no file of `torch.save` begins like this.
_JSON = b"s4w-json\n"
_DEEPEST = 64


class SavePlanner(dcp.DefaultSavePlanner):  # type: ignore[misc]
    """DCP's default planner, except that it stores values other than tensors as JSON if possible.

    JSON is used if it restores the value exactly: for ``None``, booleans, integers, finite floats,
    strings, and lists and dicts of these with strings as keys. Other values are pickled, as by the
    default planner. Loading requires `LoadPlanner`.
    """

    def create_local_plan(self) -> SavePlan:
        """The plan. Raises `UnsupportedFormatError`, with the tensor's name, for one that cannot be saved."""
        require_all_pieces(self.state_dict)
        return super().create_local_plan()

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """The bytes to store for a value."""
        if write_item.type == WriteItemType.BYTE_IO and _is_plain(object):
            text = json.dumps(object, separators=(",", ":"), allow_nan=False)
            return io.BytesIO(_JSON + text.encode())
        return super().transform_object(write_item, object)


class LoadPlanner(dcp.DefaultLoadPlanner):  # type: ignore[misc]
    """DCP's default planner, except that it never runs code from a checkpoint.

    Values that are not tensors are loaded as by ``torch.load(weights_only=True)`` with `io.BytesIO`
    allowed, or from the JSON written by `SavePlanner`.
    """

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value where it belongs."""
        fqn = read_item.dest_index.fqn
        loaded = _from_json(fqn, value) if _is_json(value) else _from_pickle(fqn, value)
        plain = io.BytesIO()
        torch.save(loaded, plain)
        plain.seek(0)
        # The base class unpickles this: it was just created here.
        super().load_bytes(read_item, plain)


def _is_plain(obj: Any, depth: int = 0) -> bool:
    """Whether JSON restores the object exactly: types, order and every bit."""
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
        # Trainers store bytes as streams. Pickles of empty ones call `bytes()`, which is allowed
        # only without arguments: a size in a pickle could ask for any amount of memory.
        with torch.serialization.safe_globals([io.BytesIO, (_no_bytes, "builtins.bytes")]):
            # Not `torch.load`: under `patch` the value is a .s4w file.
            return load(value, weights_only=True)
    except Exception as error:
        raise UnsafeLoadError(f"Weights only load failed: {fqn!r}: {error}") from None


def _no_bytes() -> bytes:
    return b""
