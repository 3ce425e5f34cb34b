"""The peers behind one interface, each used through its own API with its own defaults."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

#: The size of each dimension. Byte codecs do not use it.
Shape = tuple[int, ...]


class Peer:
    """A way to code the bytes of one tensor.

    Names of dtypes are those of safetensors. What `prepare` does is not timed.
    """

    name = ""
    #: The package that its version is taken from.
    package = ""
    #: Whether it only copies, so that there is no coded size.
    is_copy = False

    def __init__(self, threads: int) -> None:
        self.threads = threads

    @property
    def version(self) -> str:
        return importlib.metadata.version(self.package)

    def prepare(self, values: np.ndarray) -> object:
        """The input of `encode`: by default the tensor's bytes, as they are."""
        return values

    def encode(self, values: object, dtype: str, shape: Shape) -> bytes:
        raise NotImplementedError

    def decode(self, blob: bytes, nbytes: int, dtype: str) -> object:
        """The tensor's decoded bytes, as anything that `bytes` accepts."""
        raise NotImplementedError


class Copy(Peer):
    """memcpy into memory that has been written before: the fastest that any decoder could be."""

    name, package, is_copy = "memory copy", "numpy", True

    def __init__(self, threads: int) -> None:
        super().__init__(1)
        self.memory = np.empty(0, np.uint8)

    def encode(self, values: np.ndarray, dtype: str, shape: Shape) -> np.ndarray:
        if self.memory.nbytes != values.nbytes:
            self.memory = np.zeros(values.nbytes, np.uint8)
        np.copyto(self.memory, values)
        return values

    def decode(self, blob: np.ndarray, nbytes: int, dtype: str) -> np.ndarray:
        np.copyto(self.memory, blob)
        return self.memory


class Zstd(Peer):
    name, package = "zstd -3", "zstandard"

    def __init__(self, threads: int) -> None:
        import zstandard

        super().__init__(threads)
        # Only from 2 threads on: with `threads=1` it would start a worker beside the caller.
        self.coder = zstandard.ZstdCompressor(level=3, threads=0 if threads == 1 else threads)
        self.decoder = zstandard.ZstdDecompressor()

    def encode(self, values: np.ndarray, dtype: str, shape: Shape) -> bytes:
        return self.coder.compress(values)

    def decode(self, blob: bytes, nbytes: int, dtype: str) -> bytes:
        return self.decoder.decompress(blob)


class Lz4(Peer):
    name, package = "LZ4", "lz4"

    def __init__(self, threads: int) -> None:
        import lz4.block

        super().__init__(1)
        self.block = lz4.block

    def encode(self, values: np.ndarray, dtype: str, shape: Shape) -> bytes:
        return self.block.compress(values)

    def decode(self, blob: bytes, nbytes: int, dtype: str) -> bytes:
        return self.block.decompress(blob)


class ZipNN(Peer):
    name, package = "ZipNN", "zipnn"

    def __init__(self, threads: int) -> None:
        from zipnn import ZipNN as Coder

        super().__init__(threads)
        names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
        self.coders = {
            dtype: Coder(input_format="byte", bytearray_dtype=name, threads=threads)
            for dtype, name in names.items()
        }

    def prepare(self, values: np.ndarray) -> bytearray:
        # ZipNN reorders the bits of its input in place, so each run needs a fresh copy.
        return bytearray(values)

    def encode(self, values: bytearray, dtype: str, shape: Shape) -> bytes:
        return self.coders[dtype].compress(values)

    def decode(self, blob: bytes, nbytes: int, dtype: str) -> bytes:
        return self.coders[dtype].decompress(blob)


class OpenZL(Peer):
    """Floats split into parts, with an entropy coder for each, as in OpenZL's float profiles."""

    name, package = "OpenZL", "openzl"

    def __init__(self, threads: int) -> None:
        from openzl import ext

        super().__init__(1)
        self.ext = ext
        entropy = ext.graphs.Entropy()
        planes = ext.nodes.TransposeSplit()
        deconstruct = {
            "F32": (ext.nodes.Float32Deconstruct(), np.uint32, planes),
            "F16": (ext.nodes.Float16Deconstruct(), np.uint16, planes),
            "BF16": (ext.nodes.BFloat16Deconstruct(), np.uint16, None),
        }
        self.contexts = {}
        for dtype, (node, unit, split) in deconstruct.items():
            compressor = ext.Compressor()
            mantissa = split(compressor, entropy) if split else entropy
            compressor.select_starting_graph(node(compressor, mantissa, entropy))
            self.contexts[dtype] = (compressor, unit)

    def encode(self, values: np.ndarray, dtype: str, shape: Shape) -> bytes:
        compressor, unit = self.contexts[dtype]
        context = self.ext.CCtx()
        context.ref_compressor(compressor)
        context.set_parameter(self.ext.CParam.FormatVersion, self.ext.MAX_FORMAT_VERSION)
        return context.compress([self.ext.Input(self.ext.Type.Numeric, values.view(unit))])

    def decode(self, blob: bytes, nbytes: int, dtype: str) -> bytes:
        return self.ext.DCtx().decompress(blob)[0].content.as_nparray()


class Z4ai(Peer):
    name, package = "z4ai", "z4ai"

    def __init__(self, threads: int) -> None:
        import z4ai

        super().__init__(threads)
        self.module = z4ai

    def prepare(self, values: np.ndarray) -> bytes:
        return values.tobytes()

    def encode(self, values: bytes, dtype: str, shape: Shape) -> bytes:
        names = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
        return self.module.compress(values, dtype=names[dtype], threads=self.threads)

    def decode(self, blob: bytes, nbytes: int, dtype: str) -> bytes:
        return self.module.decompress(blob)


class S4Weights(Peer):
    """Our own codec without the file around it, decoding into memory that is reused."""

    package = "s4weights"
    dtypes: ClassVar = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

    def __init__(self, threads: int, preset: str, simd: str | None = None) -> None:
        from s4weights import _core

        super().__init__(threads)
        self.codec = _core.TensorCodec(preset, threads, simd)
        self.memory = np.empty(0, np.uint8)
        note = {None: "", "avx2": ", AVX2 only"}[simd]
        self.name = f"s4weights {preset}{note}" + (f", {threads} threads" if threads > 1 else "")

    def encode(self, values: np.ndarray, dtype: str, shape: Shape) -> Any:
        name = self.dtypes[dtype]
        return self.codec.compress(values.ctypes.data, values.nbytes, name, shape)

    def decode(self, blob: Any, nbytes: int, dtype: str) -> np.ndarray:
        if self.memory.nbytes != nbytes:
            self.memory = np.zeros(nbytes, np.uint8)
        self.codec.decompress(blob, self.memory.ctypes.data, nbytes)
        return self.memory


def available(threads: int) -> tuple[list[Peer], dict[str, str]]:
    """The peers that this machine has, and those that it lacks, with the reason."""
    makers: list[tuple[str, Callable[[], Peer]]] = [
        (kind.name, lambda kind=kind: kind(threads))
        for kind in (Copy, Zstd, Lz4, ZipNN, OpenZL, Z4ai)
    ]
    for preset in ("fast", "balanced"):
        for count, simd in ((threads, None), (threads, "avx2"), (2 * threads, None)):
            name = f"s4weights {preset}, {simd or 'best'} SIMD, {count} threads"
            makers.append((name, lambda p=preset, c=count, s=simd: S4Weights(c, p, s)))
    found, missing = [], {}
    for name, make in makers:
        try:
            found.append(make())
        except Exception as error:  # Whatever a peer raises, the others can still be measured.
            # Without the path that an ImportError ends in.
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0].split(" (/")[0]
    return found, missing
