"""Whole checkpoints: size and speed of each tool's `save` and `load`.

Files are in a memory file system if there is one: the tools are compared, not the disk.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch

import s4weights

MEMORY_FILES = Path("/dev/shm")

#: Writes tensors to a path; reads them back.
Tool = tuple[Callable[[dict, Path], object], Callable[[Path], dict]]


def tools(threads: int) -> dict[str, Tool]:
    """Each tool by its name."""

    def ours(preset: str) -> Tool:
        return (
            lambda tensors, path: s4weights.save(tensors, path, preset=preset, threads=threads),
            lambda path: s4weights.load(path, threads=threads),
        )

    return {
        "torch.save": (torch.save, lambda path: torch.load(path, weights_only=True)),
        "safetensors": (safetensors.torch.save_file, safetensors.torch.load_file),
        "s4weights.save, fast": ours("fast"),
        "s4weights.save, balanced": ours("balanced"),
    }


def best(repeat: int, action: Callable[[], object]) -> tuple[float, object]:
    """The shortest time of some runs, and the last outcome."""
    shortest = float("inf")
    for _ in range(repeat):
        started = time.perf_counter()
        outcome = action()
        shortest = min(shortest, time.perf_counter() - started)
    return shortest, outcome


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same, bit for bit."""
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)


def bench(files: list[Path], threads: int, repeat: int) -> dict:
    """Every tool on every file: bytes on disk, ratio, GB/s."""
    results: dict[str, dict] = {name: {} for name in tools(threads)}
    place = MEMORY_FILES if MEMORY_FILES.is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        target = Path(folder) / "checkpoint"
        for source in files:
            tensors = safetensors.torch.load_file(source)
            nbytes = sum(t.nbytes for t in tensors.values())
            for name, (save, load) in tools(threads).items():
                save_s, _ = best(repeat, lambda save=save, tensors=tensors: save(tensors, target))
                load_s, back = best(repeat, lambda load=load: load(target))
                if back.keys() != tensors.keys() or not all(same(back[k], tensors[k]) for k in back):
                    raise SystemExit(f"{name}: {source.name} came back different")
                results[name][source.stem] = {
                    "coded": target.stat().st_size,
                    "ratio": nbytes / target.stat().st_size,
                    "save_gb_s": nbytes / save_s / 1e9,
                    "load_gb_s": nbytes / load_s / 1e9,
                }
                # Loaded tensors may be a view of the file.
                del back
                target.unlink()
    return results
