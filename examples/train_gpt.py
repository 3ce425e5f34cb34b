"""Train a small GPT on Python's own source, with checkpoints that a killed run resumes from.

    python examples/train_gpt.py --checkpoints runs/a
    python examples/train_gpt.py --store s3://bucket/runs/a

Run it again with the same folder or store, and it goes on from the newest checkpoint. The result
does not depend on how often it was killed: a checkpoint holds the model, the optimizer, the
schedule, the step, the losses so far and the state of every random number generator.

With `--checkpoints`, each checkpoint is a separate file; with `--store`, most are stored as their
difference from an earlier one, in a folder or a bucket.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import sysconfig
import threading
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import s4weights

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 128, 192, 6, 4, 8
PEAK_LR, WARMUP = 1e-3, 10


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each around a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = (batch, length, HEADS, WIDTH // HEADS)
        q, k, v = (t.view(heads).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.dropout(F.gelu(self.up(self.ln2(x))), 0.1, self.training))


class GPT(nn.Module):
    """A decoder over bytes; the embedding is tied to the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.wte.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


class Run:
    """The whole state of one training run."""

    def __init__(self, steps: int, seed: int = 1) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.texts = standard_library()
        self.model = GPT()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), PEAK_LR, betas=(0.9, 0.95))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: schedule(step, steps)
        )
        self.step = 0
        self.losses: list[float] = []

    def state(self) -> dict:
        """Everything that the rest of the run depends on."""
        name, key, position, has_gauss, gauss = np.random.get_state()
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "step": self.step,
            "losses": list(self.losses),
            "rng": {
                "torch": torch.get_rng_state(),
                # As plain values and tensors, which load without unpickling any code.
                "numpy": (name, torch.from_numpy(key.astype(np.int64)), position, has_gauss, gauss),
                "python": random.getstate(),
            },
        }

    def restore(self, state: dict) -> None:
        """Continues where `state` was taken."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step, self.losses = state["step"], list(state["losses"])
        rng = state["rng"]
        torch.set_rng_state(rng["torch"])
        name, key, position, has_gauss, gauss = rng["numpy"]
        np.random.set_state((name, key.numpy().astype(np.uint32), position, has_gauss, gauss))
        random.setstate(rng["python"])

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Random stretches of random files: tokens, and the tokens that follow them."""
        rows = []
        for text in random.choices(self.texts, k=BATCH):
            at = np.random.randint(0, len(text) - CONTEXT)
            rows.append(np.frombuffer(text, np.uint8, CONTEXT + 1, at))
        tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
        return tokens[:, :-1], tokens[:, 1:]

    def train_step(self, killed: bool = False) -> None:
        """One step of AdamW; with `killed`, the process dies in the middle of it."""
        tokens, targets = self.batch()
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        if killed:
            print(f"  step {self.step + 1}: SIGKILL, between backward() and the update", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        self.losses.append(loss.item())


def schedule(step: int, steps: int) -> float:
    """A linear warm-up, then half a cosine down to a tenth."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - WARMUP) / max(1, steps - WARMUP)))


def standard_library() -> list[bytes]:
    """The modules of Python's standard library, as text: every machine with Python has them."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    return [text for text in texts if len(text) > 4 * CONTEXT]


class Files:
    """Checkpoints as files in a folder."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.folder: Path = args.checkpoints
        self.folder.mkdir(parents=True, exist_ok=True)

    def resume(self, run: Run) -> str | None:
        """Restores the newest checkpoint, if there is one; returns its name."""
        newest = max(self.folder.glob("step-*.s4w"), default=None)
        if newest is not None:
            run.restore(s4weights.load(newest))
        return newest and newest.name

    def save(self, run: Run) -> str:
        """Saves a checkpoint; returns a note for the log line."""
        s4weights.save(run.state(), self.folder / f"step-{run.step:06}.s4w")
        return ""


class Store:
    """Checkpoints in a store: a folder, or a URL."""

    #: Bytes per second, and seconds: the save that will be killed is slow enough to be cut off.
    SLOW, KILLED_AFTER = 2_000_000, 1.0

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.store = self.open()

    def open(self, bandwidth: int | None = None) -> s4weights.CheckpointStore:
        return s4weights.CheckpointStore(
            self.args.store,
            storage_options=dict(option.split("=", 1) for option in self.args.storage_option),
            max_chain=self.args.max_chain,
            bandwidth=bandwidth,
            runner=self.args.runner,
        )

    def resume(self, run: Run) -> str | None:
        """Restores the newest checkpoint, if there is one; returns its name."""
        if self.args.runner:
            try:
                run.restore(self.store.load_checkpoint())
            except s4weights.NotFoundError:
                return None
            return f"step {run.step}, which the runner had"
        step = self.store.latest()
        if step is None:
            return None
        run.restore(self.store.load_checkpoint())
        return f"step {step} of the store"

    def save(self, run: Run) -> str:
        """Saves a checkpoint; returns a note for the log line."""
        if run.step == self.args.kill_in_save:
            print(f"  step {run.step}: SIGKILL, while its checkpoint is uploaded", flush=True)
            self.store = self.open(bandwidth=self.SLOW)
            kill = (os.getpid(), signal.SIGKILL)
            threading.Timer(self.KILLED_AFTER, os.kill, kill).start()
        started = time.perf_counter()
        metrics = {"loss": run.losses[-1]}
        entry = self.store.save_checkpoint(run.state(), run.step, metrics=metrics)
        took = time.perf_counter() - started
        if self.args.runner:
            return f", accepted by the runner in {took:.2f} s"
        return f", saved {entry.bytes} of {entry.raw_bytes} bytes as a {entry.kind} in {took:.3f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--checkpoints", type=Path, help="folder to save files in")
    place.add_argument("--store", help="folder or URL of a checkpoint store")
    parser.add_argument("--storage-option", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--runner", help="socket of a runner that saves to the store")
    parser.add_argument("--max-chain", type=int, help="most checkpoints that share a base")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--kill-in-step", type=int, default=0, help="die in the middle of it")
    parser.add_argument("--kill-in-save", type=int, default=0, help="die during its save")
    parser.add_argument("--final", type=Path, help="torch.save the last state here as well")
    args = parser.parse_args()

    # A fixed order of every sum: the same numbers give the same bits, however busy the machine is.
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    run = Run(args.steps)
    keeper = Store(args) if args.store else Files(args)
    if resumed := keeper.resume(run):
        print(f"  resumed from {resumed}", flush=True)
    started, first = time.perf_counter(), run.step
    while run.step < args.steps:
        run.train_step(killed=run.step + 1 == args.kill_in_step)
        if run.step % args.save_every == 0:
            pace = (time.perf_counter() - started) / (run.step - first)
            said = keeper.save(run) or f", {pace:.2f} s a step"
            print(f"  step {run.step}: loss {run.losses[-1]:.4f}{said}", flush=True)
    if args.final:
        torch.save(run.state(), args.final)


if __name__ == "__main__":
    main()
