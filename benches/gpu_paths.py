"""Whole paths of GPU tensors: to a file in a memory file system and back to the GPU.

    python benches/gpu_paths.py [--gb 0.25 2.5 4] [--repeat 3] [--out FOLDER]

Several states: bf16 models with their AdamW states in fp32, and 3,000 small tensors. Every tool saves
the same tensors and loads them to the GPU; what comes back is compared bit for bit. Values are like
those of training: normally distributed weights whose scale depends on the layer, and moments of
gradients whose scale differs from row to row. `gpu_paths.json`, `.md` and `.svg` are written to the
folder of `--out`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_paths_report as report
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import s4weights

MEMORY_FILES = Path("/dev/shm")

State = dict[str, torch.Tensor]
#: Saves a state to a path; loads it to the GPU.
Tool = tuple[Callable[[State, Path], object], Callable[[State, Path], State]]


def gradient(shape: tuple[int, ...], scale: float) -> torch.Tensor:
    """A random gradient whose rows differ in scale, as those of a real one do."""
    out = torch.randn(shape, device="cuda") * scale
    rows = torch.randn(shape[0], device="cuda").exp()
    return out * rows.view(-1, *[1] * (len(shape) - 1))


def training_state(gigabytes: float) -> State:
    """A transformer in bf16, AdamW's master copy and moments in fp32: 14 bytes per parameter."""
    width, state, total = 2048, {}, 0.0
    shapes = {"qkv": (3 * width, width), "out": (width, width), "up": (4 * width, width)}
    shapes |= {"down": (width, 4 * width), "norm": (width,)}
    layer = 0
    while total < gigabytes * 1e9:
        for name, shape in shapes.items():
            size = 0.02 / (1 + layer) ** 0.5 if name in ("out", "down") else 0.02
            master = torch.randn(shape, device="cuda") * size
            first, second = torch.zeros_like(master), torch.zeros_like(master)
            for _ in range(4):
                g = gradient(shape, 1e-4)
                first.mul_(0.9).add_(g, alpha=0.1)
                second.mul_(0.95).addcmul_(g, g, value=0.05)
            key = f"layers.{layer}.{name}"
            state[f"model.{key}"] = master.bfloat16()
            state[f"optimizer.{key}.master"] = master
            state[f"optimizer.{key}.exp_avg"] = first
            state[f"optimizer.{key}.exp_avg_sq"] = second
            total += 14 * master.numel()
        layer += 1
    return state


def small_state() -> State:
    """3,000 tensors of 16 to 32,768 values."""
    generator = torch.Generator().manual_seed(0)
    sizes = [16 << int(i) for i in torch.randint(0, 12, (3000,), generator=generator)]
    dtypes = [torch.bfloat16, torch.float32]
    return {
        f"layers.{i}.weight": (torch.randn(n, device="cuda") * 0.02).to(dtypes[i % 2])
        for i, n in enumerate(sizes)
    }


def tools() -> dict[str, Tool]:
    """Each tool by its name."""

    def dcp_load(state: State, path: Path) -> State:
        into = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        dcp.load(into, checkpoint_id=path, no_dist=True)
        return into

    def into(state: State, path: Path) -> State:
        made = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        s4weights.load_into(made, path, device="cuda")
        return made

    def ours(preset: str) -> Tool:
        return (
            lambda state, path: s4weights.save(state, path, preset=preset, device="cuda"),
            lambda state, path: s4weights.load(path, "cuda", device="cuda"),
        )

    return {
        "torch.save": (
            lambda state, path: torch.save(state, path),
            lambda state, path: torch.load(path, "cuda", weights_only=True),
        ),
        "safetensors": (
            lambda state, path: safetensors.torch.save_file(state, path),
            lambda state, path: safetensors.torch.load_file(path, device="cuda"),
        ),
        "DCP": (
            lambda state, path: dcp.save(state, checkpoint_id=path, no_dist=True),
            dcp_load,
        ),
        "s4weights fast": ours("fast"),
        "s4weights fast, load_into": (ours("fast")[0], into),
        "s4weights balanced": ours("balanced"),
    }


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    torch.cuda.synchronize()
    started = time.perf_counter()
    out = action()
    torch.cuda.synchronize()
    return time.perf_counter() - started, out


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same, bit for bit."""
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


def measure(state: State, tool: Tool, folder: Path, repeat: int) -> dict[str, float]:
    """The best of some saves and loads, each to a new file."""
    save, load = tool
    save_s, load_s = [], []
    for i in range(repeat):
        path = folder / f"checkpoint{i}"
        seconds, _ = timed(lambda path=path: save(state, path))
        save_s.append(seconds)
        coded = sum(p.stat().st_size for p in ([path] if path.is_file() else path.iterdir()))
        seconds, back = timed(lambda path=path: load(state, path))
        load_s.append(seconds)
        if back.keys() != state.keys() or not all(same(back[k], state[k]) for k in state):
            raise SystemExit("what came back differs")
        del back
        path.unlink() if path.is_file() else shutil.rmtree(path)
    nbytes = sum(t.nbytes for t in state.values())
    return {
        "ratio": nbytes / coded,
        "save_s": min(save_s),
        "load_s": min(load_s),
        "save_gb_s": nbytes / min(save_s) / 1e9,
        "load_gb_s": nbytes / min(load_s) / 1e9,
    }


def warm_up(folder: Path, gigabytes: float) -> None:
    """Touches as much memory as the files will take. Where a virtual machine is given memory only
    on first use, the first file would be slow."""
    piece = bytes(8 << 20)
    with open(folder / "warm", "wb", buffering=0) as file:
        for _ in range(int(2 * gigabytes * 1e9) // len(piece)):
            file.write(piece)
    (folder / "warm").unlink()


def ceilings(folder: Path) -> dict[str, float]:
    """GB/s of pinned copies to the host and back, and of one thread that writes a new file."""
    n = 1 << 30
    on_gpu = torch.empty(n, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(n, dtype=torch.uint8, pin_memory=True)
    down_s = min(timed(lambda: pinned.copy_(on_gpu))[0] for _ in range(3))
    up_s = min(timed(lambda: on_gpu.copy_(pinned))[0] for _ in range(3))
    piece, write_s = bytes(8 << 20), []
    for _ in range(2):
        started = time.perf_counter()
        with open(folder / "ceiling", "wb", buffering=0) as file:
            for _ in range(n // len(piece)):
                file.write(piece)
        write_s.append(time.perf_counter() - started)
        (folder / "ceiling").unlink()
    return {
        "copy_to_host_gb_s": n / down_s / 1e9,
        "copy_to_device_gb_s": n / up_s / 1e9,
        "write_gb_s": n / min(write_s) / 1e9,
    }


def rows(state: State, folder: Path, repeat: int) -> dict[str, dict[str, float]]:
    """The results of each tool for a state."""
    found = {}
    for tool, functions in tools().items():
        try:
            found[tool] = row = measure(state, functions, folder, repeat)
        except Exception as error:
            if tool.startswith("s4weights"):
                raise
            # A peer that does not run here must not stop the others.
            print(f"  {tool:28}{error!r}")
            continue
        print(
            f"  {tool:28} ratio {row['ratio']:.3f}  "
            f"save {row['save_gb_s']:7.2f} GB/s {row['save_s'] * 1e3:8.1f} ms  "
            f"load {row['load_gb_s']:7.2f} GB/s {row['load_s'] * 1e3:8.1f} ms",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, nargs="*", default=[0.25, 2.5, 4])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benches/results"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device that PyTorch can use")
    torch.manual_seed(0)
    states: list[tuple[str, Callable[[], State]]] = [("3,000 small tensors", small_state)]
    for size in arguments.gb:
        states.append(("training state", lambda size=size: training_state(size)))
    place = MEMORY_FILES if MEMORY_FILES.is_dir() else None
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "repeat": arguments.repeat,
        "states": [],
    }
    with tempfile.TemporaryDirectory(dir=place) as name:
        folder = Path(name)
        warm_up(folder, max(arguments.gb, default=1))
        results["ceilings"] = ceilings(folder)
        print({k: round(v, 1) for k, v in results["ceilings"].items()})
        for what, make in states:
            state = make()
            nbytes = sum(t.nbytes for t in state.values())
            print(f"{what}: {len(state)} tensors, {nbytes / 1e9:.2f} GB")
            found = rows(state, folder, arguments.repeat)
            results["states"].append(
                {"name": what, "tensors": len(state), "bytes": nbytes, "tools": found}
            )
            del state
    arguments.out.mkdir(parents=True, exist_ok=True)
    for suffix, text in (
        ("json", json.dumps(results, indent=1) + "\n"),
        ("md", report.markdown(results)),
        ("svg", report.picture(results)),
    ):
        (arguments.out / f"gpu_paths.{suffix}").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
