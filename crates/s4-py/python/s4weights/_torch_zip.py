"""Finds the tensors in files written by `torch.save`, without running pickled code."""

from __future__ import annotations

import io
import pickletools
import struct
import zipfile

import torch

#: The end record of ZIP archives: its signature, and its size without the comment.
_END, _END_BYTES = b"PK\5\6", 22
_START, _DIRECTORY, _LARGE_END, _LOCATOR = b"PK\3\4", b"PK\1\2", b"PK\6\6", b"PK\6\7"
#: Smaller storages, in bytes, are not treated as tensors.
_LEAST = 1024
#: The dtype of each storage class, by its name.
_CLASSES = {f"{name}Storage": dtype for name, dtype in (
    ("Double", torch.float64), ("Float", torch.float32), ("Half", torch.float16),
    ("Long", torch.int64), ("Int", torch.int32), ("Short", torch.int16), ("Char", torch.int8),
    ("Byte", torch.uint8), ("Bool", torch.bool), ("BFloat16", torch.bfloat16),
    ("ComplexDouble", torch.complex128), ("ComplexFloat", torch.complex64),
)}  # fmt: skip


def find_storages(values: bytearray) -> list[tuple[int, int, torch.dtype]]:
    """The first byte, size and dtype of each large storage, in the order of their positions. Data
    that is not a file of `torch.save`, or that PyTorch wrote in another layout, has none.
    """
    found = []
    at = 0
    view = memoryview(values)
    while (start := values.find(_START, at)) >= 0:
        end = _archive_end(values, start)
        if end is None:
            break
        found += _of_archive(view[start:end], start)
        at = end
    return sorted(found)


def _archive_end(values: bytearray, start: int) -> int | None:
    """The end of the archive that begins at ``start``: after the first end record that fits it."""
    at = start
    while (at := values.find(_END, at)) >= 0:
        record = values[at : at + _END_BYTES]
        if len(record) == _END_BYTES:
            offset = struct.unpack("<I", record[16:20])[0]
            if offset == 0xFFFFFFFF:
                # 4 GiB or more: the true offset is in the ZIP64 end record.
                offset = _large_offset(values, start, at)
            place = start + offset
            if place < at and values[place : place + 4] == _DIRECTORY:
                return at + _END_BYTES
        at += 1
    return None


def _large_offset(values: bytearray, start: int, at: int) -> int:
    """The offset of the directory of a ZIP64 archive whose end record is at ``at``; beyond the end
    of the data if it is not one.
    """
    locator = values[at - 20 : at]
    if len(locator) == 20 and locator[:4] == _LOCATOR:
        place = start + struct.unpack("<Q", locator[8:16])[0]
        record = values[place : place + 56]
        if len(record) == 56 and record[:4] == _LARGE_END:
            return int(struct.unpack("<Q", record[48:56])[0])
    return len(values)


def _of_archive(view: memoryview, start: int) -> list[tuple[int, int, torch.dtype]]:
    try:
        with zipfile.ZipFile(io.BytesIO(view)) as archive:
            infos = {info.filename: info for info in archive.infolist()}
            pickled = [name for name in infos if name.endswith("/data.pkl")]
            if len(pickled) != 1:
                return []
            folder = pickled[0].removesuffix("data.pkl")
            dtypes = _dtypes(archive.read(pickled[0]))
    except (zipfile.BadZipFile, ValueError, KeyError, NotImplementedError):
        return []
    found = []
    for key, dtype in dtypes.items():
        info = infos.get(f"{folder}data/{key}")
        if info is None or info.compress_type != zipfile.ZIP_STORED or info.file_size < _LEAST:
            continue
        head = view[info.header_offset : info.header_offset + 30]
        if len(head) < 30 or info.file_size % dtype.itemsize:
            continue
        names, extra = struct.unpack("<HH", head[26:30])
        first = info.header_offset + 30 + names + extra
        if first + info.file_size <= len(view):
            found.append((start + first, info.file_size, dtype))
    return found


def _dtypes(pickled: bytes) -> dict[str, torch.dtype]:
    """The dtypes of storages by their keys, from the opcodes that precede each persistent id."""
    found: dict[str, torch.dtype] = {}
    kind: torch.dtype | None = None
    texts: list[str] = []
    memo: dict[int, object] = {}
    last: object = None
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name == "GLOBAL":
            name = str(argument).rpartition(" ")[2]
            last = _CLASSES.get(name)
        elif opcode.name in ("BINUNICODE", "SHORT_BINUNICODE"):
            last = str(argument)
        elif opcode.name in ("BINPUT", "LONG_BINPUT"):
            memo[int(argument or 0)] = last
            continue
        elif opcode.name in ("BINGET", "LONG_BINGET"):
            last = memo.get(int(argument or 0))
        elif opcode.name == "BINPERSID":
            if kind is not None and texts:
                # The texts are the storage's key, and its location.
                found[texts[0]] = kind
            kind, texts, last = None, [], None
            continue
        else:
            continue
        if isinstance(last, torch.dtype):
            kind, texts = last, []
        elif isinstance(last, str):
            texts.append(last)
    return found
