"""A trainer that publishes its weights, and two samplers that follow it, each in its own process.

    python examples/weight_sync.py
    python examples/weight_sync.py --socket --values 50000000 --update adamw

The second sampler misses a step, and catches up through the chain. In the end both have the trainer's
weights, bit for bit. Prints the bytes of each step and the seconds that applying it takes.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from s4weights.sync import Publisher, Subscriber

#: The most values of one tensor.
ROW = 1 << 22


def weights(values: int, seed: int) -> dict[str, torch.Tensor]:
    """bf16 tensors with values as large as those of a trained model."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [min(ROW, values - at) for at in range(0, values, ROW)]
    return {
        f"layers.{i}.weight": (torch.randn(size, generator=generator) * 0.02).to(torch.bfloat16)
        for i, size in enumerate(sizes)
    }


def digest(state: dict[str, torch.Tensor]) -> str:
    """A hash that tells whether two states are the same."""
    found = hashlib.blake2b()
    for name, tensor in sorted(state.items()):
        found.update(name.encode())
        found.update(tensor.view(torch.uint8).numpy().data)
    return found.hexdigest()


def few(state: dict[str, torch.Tensor], share: float = 0.003) -> Iterator[None]:
    """Updates that change a share of the values by a unit in the last place."""
    generator = torch.Generator().manual_seed(7)
    while True:
        for tensor in state.values():
            count = int(tensor.numel() * share)
            chosen = torch.randint(tensor.numel(), (count,), generator=generator)
            tensor.view(torch.int16)[chosen] ^= 1
        yield


def adamw(state: dict[str, torch.Tensor]) -> Iterator[None]:
    """Steps of AdamW on float32 copies, at the learning rate of an alignment run."""
    generator = torch.Generator().manual_seed(7)
    copies = {name: torch.nn.Parameter(t.float()) for name, t in state.items()}
    optimizer = torch.optim.AdamW(copies.values(), lr=1e-6, weight_decay=0.01)
    while True:
        for copy in copies.values():
            copy.grad = torch.randn(copy.shape, generator=generator)
        optimizer.step()
        with torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(copies[name])
        yield


UPDATES = {"few": few, "adamw": adamw}


def train(
    place: str, listen: str | None, arguments: argparse.Namespace, tell: Any, barrier: Any
) -> None:
    """The trainer."""
    torch.set_num_threads(1)
    state = weights(arguments.values, seed=1)
    update = UPDATES[arguments.update](state)
    with Publisher(place, listen=listen) as publisher:
        tell.put(publisher.address or place)
        tell.put(publisher.address or place)
        for step in range(arguments.steps):
            if step:
                next(update)
            entry = publisher.publish_delta(state, step)
            share = 100 * entry.bytes / entry.raw_bytes
            print(
                f"trainer: step {step}: a {entry.kind} of {entry.bytes:,} bytes, {share:.2f}% of "
                f"{entry.raw_bytes:,}",
                flush=True,
            )
            barrier.wait()  # The step is published.
            barrier.wait()  # Both samplers have applied or skipped it.
        tell.put(digest(state))
        tell.put(digest(state))
        barrier.wait()


def sample(rank: int, arguments: argparse.Namespace, told: Any, barrier: Any) -> None:
    """A sampler. The second one is busy when the last step but one is published."""
    torch.set_num_threads(1)
    state = weights(arguments.values, seed=100 + rank)
    with Subscriber(told.get(), state) as subscriber:
        for step in range(arguments.steps):
            barrier.wait()
            if rank == 1 and step == arguments.steps - 2:
                print(f"sampler 1: busy, misses step {step}", flush=True)
            else:
                done = subscriber.apply_delta(wait=30.0)
                assert done is not None and done.step == step
                how = "from its base" if done.why_base else f"{done.deltas} deltas"
                print(
                    f"sampler {rank}: step {step}: {how}, {done.bytes:,} bytes in {done.seconds:.3f} s",
                    flush=True,
                )
            barrier.wait()
        if told.get() != digest(state):
            print(f"sampler {rank}: other weights than the trainer's", flush=True)
            sys.exit(1)
        print(f"sampler {rank}: the trainer's weights, bit for bit", flush=True)
        barrier.wait()


def main() -> int:
    """Runs all three; returns 0 if both samplers have the trainer's weights."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=4_000_000, help="parameters, in bf16")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--update", choices=UPDATES, default="few")
    parser.add_argument("--socket", action="store_true", help="no folder: over TCP")
    parser.add_argument("--folder", type=Path, help="where to publish (a new folder)")
    arguments = parser.parse_args()
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    multiprocessing.set_forkserver_preload(["torch", "s4weights.sync"])
    tell, barrier = context.Queue(), context.Barrier(3)
    with tempfile.TemporaryDirectory() as temporary:
        place = str(arguments.folder or Path(temporary) / "weights")
        listen = "tcp://127.0.0.1:0" if arguments.socket else None
        given = ("memory:" if arguments.socket else place, listen, arguments, tell, barrier)
        processes = [context.Process(target=train, args=given)]
        processes += [
            context.Process(target=sample, args=(rank, arguments, tell, barrier)) for rank in (0, 1)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode:
                # The others would wait for it forever.
                barrier.abort()
    return int(any(process.exitcode for process in processes))


if __name__ == "__main__":
    sys.exit(main())
