"""Train a small GPT on Python's own source, with checkpoints that a killed run resumes from.

    python examples/train_gpt.py --checkpoints runs/a

Run it again with the same folder, and it goes on from the newest checkpoint. What it ends in does
not depend on how often it was killed: a checkpoint holds the model, the optimizer, the schedule,
the step, the losses so far and the state of every random number generator.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import sysconfig
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
    """Everything that one training run consists of."""

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
        """All that the rest of the run depends on."""
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
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - WARMUP) / (steps - WARMUP)))


def standard_library() -> list[bytes]:
    """The modules of Python's standard library, as text: every machine with Python has them."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    return [text for text in texts if len(text) > 4 * CONTEXT]


def newest(folder: Path) -> Path | None:
    """The checkpoint of the last step that was saved in `folder`."""
    return max(folder.glob("step-*.s4w"), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder to save in")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--kill-in-step", type=int, default=0, help="die in the middle of it")
    parser.add_argument("--final", type=Path, help="torch.save the last state here as well")
    args = parser.parse_args()

    # One order of every sum: the same bits from the same numbers, however busy the machine is.
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    args.checkpoints.mkdir(parents=True, exist_ok=True)
    run = Run(args.steps)
    if checkpoint := newest(args.checkpoints):
        run.restore(s4weights.load(checkpoint))
        print(f"  resumed from {checkpoint.name}", flush=True)
    started, first = time.perf_counter(), run.step
    while run.step < args.steps:
        run.train_step(killed=run.step + 1 == args.kill_in_step)
        if run.step % args.save_every == 0:
            s4weights.save(run.state(), args.checkpoints / f"step-{run.step:06}.s4w")
            pace = (time.perf_counter() - started) / (run.step - first)
            print(f"  step {run.step}: loss {run.losses[-1]:.4f}, {pace:.2f} s a step", flush=True)
    if args.final:
        torch.save(run.state(), args.final)


if __name__ == "__main__":
    main()
