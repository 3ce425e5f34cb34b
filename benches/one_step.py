"""Saves and loads of a checkpoint one optimizer step after its parent, by preset.

    python benches/one_step.py [--gb 1.6] [--dtypes fp32 bf16] [--folder /dev/shm] [--device cuda]

The state is weights and both of AdamW's moments, in one dtype. Each round saves a base to a store,
takes a step, saves the delta, and loads both to the device. The best of three rounds after a first
one counts, and the presets take turns, twice. What is loaded is compared bit for bit.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import s4weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROUNDS = 4
LR, BETAS, EPSILON, DECAY = 3e-4, (0.9, 0.95), 1e-8, 0.1


class Run:
    """Weights and moments of some layers, and how many steps they took."""

    def __init__(self, gigabytes: float, dtype: torch.dtype, device: str) -> None:
        count = max(1, round(gigabytes * 1e9 / (3 * dtype.itemsize * 2048 * 8192)))
        shape = (2048, 8192) if gigabytes >= 0.1 else (512, 512)
        self.weights = [(torch.randn(shape, device=device) * 0.02).to(dtype) for _ in range(count)]
        self.first = [torch.zeros_like(w) for w in self.weights]
        self.second = [torch.zeros_like(w) for w in self.weights]
        self.steps = 0
        for _ in range(5):
            self.train()

    def train(self) -> None:
        """A step of AdamW, computed in fp32."""
        self.steps += 1
        for weight, first, second in zip(self.weights, self.first, self.second, strict=True):
            gradient = torch.randn_like(weight).mul_(1e-3)
            first.mul_(BETAS[0]).add_(gradient, alpha=1 - BETAS[0])
            second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
            root = (second.float() / (1 - BETAS[1] ** self.steps)).sqrt() + EPSILON
            update = first.float() / (1 - BETAS[0] ** self.steps) / root
            weight.copy_(weight.float() * (1 - LR * DECAY) - LR * update)

    def tensors(self) -> list[torch.Tensor]:
        return [*self.weights, *self.first, *self.second]

    def state(self) -> dict[str, Any]:
        moments = zip(self.first, self.second, strict=True)
        slots = {i: {"exp_avg": m, "exp_avg_sq": v} for i, (m, v) in enumerate(moments)}
        group = {"lr": LR, "betas": BETAS, "eps": EPSILON, "params": list(slots)}
        model = {f"layers.{i}.weight": w for i, w in enumerate(self.weights)}
        return {"model": model, "optimizer": {"state": slots, "param_groups": [group]}}


def check(run: Run, back: dict[str, Any]) -> None:
    slots = back["optimizer"]["state"].values()
    moments = [slot[kind] for kind in ("exp_avg", "exp_avg_sq") for slot in slots]
    found = [*back["model"].values(), *moments]
    for x, y in zip(run.tensors(), found, strict=True):
        if not torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
            raise SystemExit("what comes back differs")


def measure(run: Run, preset: str, parent: Path, device: str) -> str:
    """A row of the table."""
    raw = sum(t.numel() * t.element_size() for t in run.tensors())
    times: dict[str, list[float]] = {}

    def sync() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    def timed(what: str, call: Callable[[], Any]) -> Any:
        sync()
        start = time.perf_counter()
        out = call()
        sync()
        times.setdefault(what, []).append(time.perf_counter() - start)
        return out

    with tempfile.TemporaryDirectory(dir=parent) as folder:
        def stored() -> int:
            return sum(f.stat().st_size for f in Path(folder).rglob("*") if f.is_file())

        with s4weights.CheckpointStore(Path(folder) / "store", preset=preset) as store:
            for i in range(ROUNDS):
                for what in ("base", "delta"):
                    before, base = stored(), what == "base"
                    step = 2 * i + (not base)
                    save = functools.partial(store.save_checkpoint, run.state(), step, base=base)
                    timed(f"save {what}", save)
                    size = stored() - before
                    load = functools.partial(store.load_checkpoint, map_location=device)
                    check(run, timed(f"load {what}", load))
                    if base:
                        run.train()
    speeds = " | ".join(f"{raw / min(seconds[1:]) / 1e9:.1f}" for seconds in times.values())
    return f"{preset} | {speeds} | {raw / size:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=1.6)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    args = parser.parse_args()
    print("GB/s of values, and the ratio of the delta:\n")
    print("| dtype | preset | save base | load base | save delta | load delta | ratio |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for dtype in args.dtypes:
        run = Run(args.gb, DTYPES[dtype], args.device)
        for preset in ("fast", "balanced") * 2:
            print(f"| {dtype} | {measure(run, preset, args.folder, args.device)} |", flush=True)


if __name__ == "__main__":
    main()
