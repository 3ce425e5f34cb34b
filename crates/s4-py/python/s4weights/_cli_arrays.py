"""Writes the tensors of a pickled object to a .safetensors file, for the command line. Only PyTorch
can determine the tensors and their shapes. For other objects the native program does this.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from . import _core
from ._cli_torch import replacing
from ._errors import UnsupportedFormatError
from ._load import layouts_of
from ._names import walk_tensors
from ._open import File

#: The dtypes of safetensors.
_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}

#: Limits on the tensors' size relative to the stored bytes, as in the native program: views may
#: repeat values without end.
_MOST_TIMES, _MOST_MORE = 16, 1 << 30


def write_arrays(
    reader: _core.Reader, where: str, target: str, *, force: bool
) -> tuple[int, str]:
    """Write the tensors under the names that `open` gives them. Return their number, and what is left out."""
    file = File(where, reader, "cpu", True)
    metadata, ties = file.metadata(), 0
    header: dict[str, Any] = {}
    kept: dict[Any, str] = {}
    stored = sum(nbytes for *_, nbytes in reader.tensors())
    written = 0
    for name, (tensor, number) in file._saved.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES or name == "__metadata__":
            what = "a name" if dtype in _DTYPES else f"{dtype}, a dtype"
            message = (
                f"{where}: tensor `{name}` has {what} that safetensors does not support; write a .pt file instead"
            )
            raise UnsupportedFormatError(message)
        lazy = tensor.is_conj(), tensor.is_neg()
        place = (number, dtype, tensor.storage_offset(), tensor.shape, tensor.stride(), lazy)
        # As the native program and safetensors' own `save_model` do: of several tensors that are
        # the same, one is written, and the metadata has the names of the others.
        if place in kept:
            metadata.setdefault(name, kept[place])
            ties += 1
            continue
        kept[place] = name
        nbytes = math.prod(tensor.shape) * tensor.element_size()
        written += nbytes
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(tensor.shape), "bytes": nbytes}
        if written > stored * _MOST_TIMES + _MOST_MORE:
            message = (
                f"{where}: its tensors repeat what is stored, and a .safetensors file would hold every copy: "
                f"at least {written} bytes for {stored} stored; write a .pt file instead"
            )
            raise UnsupportedFormatError(message)
    # Wide elements first, so that all are aligned.
    order = sorted(header, key=lambda name: (-file._saved[name].tensor.element_size(), name))
    ordered: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name in order:
        about = header[name]
        start, end = end, end + about.pop("bytes")
        ordered[name] = {**about, "data_offsets": [start, end]}
    text = json.dumps(ordered, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replacing(target, force=force) as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            values = file.get_tensor(name).resolve_conj().resolve_neg().contiguous()
            out.write(values.reshape(-1).view(torch.uint8).numpy().data)
    return len(order), _left_out(reader, ties)


def _left_out(reader: _core.Reader, ties: int) -> str:
    parts = ["the object that contains the tensors, with all other values"]
    obj = layouts_of(reader, True).obj
    others = sum(t.layout is not torch.strided for _, t in walk_tensors(obj, as_state=True))
    if others:
        parts.append(f"{others} sparse tensor{'s' if others > 1 else ''}")
    if ties:
        plural, share = ("s", "share their") if ties > 1 else ("", "shares its")
        parts.append(f"{ties} tensor{plural} that {share} values with others")
    return "; ".join(parts)
