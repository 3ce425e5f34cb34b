"""Distributed checkpoints: `s4weights.dcp` beside PyTorch's own storage, in one run.

    torchrun --nproc-per-node 2 benches/distributed.py --gb 3 --folder /dev/shm/dcp

Trains an FSDP2 model of fp32 weights with AdamW for some steps, so that the state has the
structure of a real one, then saves and loads it. Each row is the best of three rounds, after one
that does not count; a round takes as long as its slowest rank. Runs on GPUs if there are any
(NCCL), else on CPUs (gloo). PyTorch's storage is measured with its defaults, with its Zstandard
extension, and with pinned memory and overlap. "Resharded" rows load into tensors that are sharded
along another dimension.

A memory disk is first filled with 16 times the state, fewer bytes than the saves write, and emptied:
a virtual machine gets its memory from the host at the first touch, which would slow down the rows that
happen to run first. ``--out`` keeps the seconds of every round, the first one included.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from stock_stager import pinned_stager
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import s4weights
from s4weights.dcp import LoadPlanner, Stager, StorageReader, StorageWriter

ROUNDS = 3

#: The disk is filled with this many times the state before anything is measured.
FILLED = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=3.0, help="state of all ranks, in GB")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/s4weights-dcp"))
    parser.add_argument("--only", nargs="+", default=[""], help="only rows whose names contain one of these")
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if rank == 0:
        shutil.rmtree(args.folder, ignore_errors=True)
        args.folder.mkdir(parents=True)
    dist.barrier()
    touch_disk(args.folder / f"touched-{rank}", int(FILLED * args.gb * 1e9) // world)
    bench = Bench(args.folder, device, train(args.gb, device, world), args.only)
    bench.run()
    if rank == 0:
        bench.print()
        if args.out is not None:
            args.out.write_text(json.dumps(bench.rows, indent=1))
        shutil.rmtree(args.folder, ignore_errors=True)
    dist.destroy_process_group()


def touch_disk(path: Path, size: int) -> None:
    """Writes a file of `size` bytes and removes it, on all ranks."""
    block = bytes(64 << 20)
    with path.open("wb") as file:
        while file.tell() < size:
            file.write(block)
    dist.barrier()
    path.unlink()
    dist.barrier()


def train(gb: float, device: torch.device, world: int) -> tuple[torch.nn.Module, Any]:
    """A model whose weights and moments take `gb` GB, and its optimizer, after some steps."""
    width = 2048
    layers = max(1, round(gb * 1e9 / (12 * width * width)))
    torch.manual_seed(1)
    with device:
        blocks = [torch.nn.Linear(width, width, bias=False) for _ in range(layers)]
    model = torch.nn.Sequential(*blocks)
    mesh = init_device_mesh(device.type, (world,))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(4):
        one_step(model, optimizer)
    return model, optimizer


def one_step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """One step of training, on random input."""
    first = next(model.parameters())
    x = torch.randn(16, first.shape[1], device=first.device)
    for layer in model:
        x = x + torch.tanh(layer(x))
    x.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def resharded(state: Any) -> Any:
    """The same state, but with matrices of zeros that are sharded along the second dimension."""
    if isinstance(state, dict):
        return {key: resharded(value) for key, value in state.items()}
    if isinstance(state, DTensor) and state.dim() > 1:
        local = torch.zeros(
            state.shape[0],
            state.shape[1] // state.device_mesh.size(),
            dtype=state.dtype,
            device=state.device,
        )
        return DTensor.from_local(local, state.device_mesh, [Shard(1)])
    return state


class Bench:
    """Rows of one run."""

    def __init__(
        self, folder: Path, device: torch.device, trained: tuple[Any, Any], only: list[str]
    ) -> None:
        self.folder, self.device, self.trained, self.only = folder, device, trained, only
        model, optimizer = get_state_dict(*trained)
        self.state = {"model": model, "optim": optimizer}
        self.rows: list[dict[str, Any]] = []
        self.step = 0
        # For background saves, whose messages must not mix with those of this thread.
        self.behind = dist.new_group(backend="gloo")

    def run(self) -> None:
        stock = self.folder / "stock"
        self.row("dcp.save, stock", lambda: dcp.save(self.state, checkpoint_id=stock), stock)
        self.row("dcp.load, stock", lambda: dcp.load(self.state, checkpoint_id=stock))
        cut = resharded(self.state)
        self.row("dcp.load, stock, resharded", lambda: dcp.load(cut, checkpoint_id=stock))
        self.compressed(self.folder / "stock-zstd")
        for preset in ("fast", "balanced"):
            self.preset(preset, self.folder / preset)
        self.background("dcp.async_save, stock stager", lambda: {"checkpoint_id": self.fresh()})
        if self.device.type == "cuda":
            self.overlapped()
        self.background(
            "dcp.async_save, s4weights, stock stager",
            lambda: {"storage_writer": self.writer(self.folder / "async", True)},
        )
        with contextlib.closing(Stager()) as stager:
            self.background(
                "dcp.async_save, s4weights stager",
                lambda: {
                    "storage_writer": self.writer(self.folder / "staged", True),
                    "async_stager": stager,
                },
            )

    def compressed(self, folder: Path) -> None:
        """PyTorch's storage with its own compression."""
        try:
            from torch.distributed.checkpoint._extension import ZStandard

            extensions = [ZStandard()]
        except (ImportError, ValueError) as error:
            self.note(f"no Zstandard here: {error}", float("nan"), None, None)
            return
        write = lambda: dcp.FileSystemWriter(folder, _extensions=extensions)  # noqa: E731
        name = "stock with Zstandard"
        self.row(f"dcp.save, {name}", lambda: dcp.save(self.state, storage_writer=write()), folder)
        self.row(f"dcp.load, {name}", lambda: dcp.load(self.state, checkpoint_id=folder))

    def overlapped(self) -> None:
        """PyTorch's stager as in its recipe for fast staging; saves share the pinned memory."""
        name = "dcp.async_save, stock, pinned and overlapped"
        with pinned_stager() as stager:
            arguments = lambda: {"checkpoint_id": self.fresh(), "async_stager": stager}  # noqa: E731
            try:
                self.background(name, arguments)
            except Exception as error:  # Raised on all ranks: other rows can still be measured.
                self.note(f"{name}: {type(error).__name__}: {error}", float("nan"), None, None)

    def preset(self, preset: str, store: Path) -> None:
        name = f"s4weights {preset}"
        self.row(f"dcp.save, {name}, base", lambda: self.save(store, True), store)
        self.row(f"dcp.load, {name}", lambda: self.load(store))
        cut = resharded(self.state)
        self.row(f"dcp.load, {name}, resharded", lambda: self.load(store, cut))
        # Each save is one training step after the one before.
        train = lambda: one_step(*self.trained)  # noqa: E731
        self.row(f"dcp.save, {name}, delta", lambda: self.save(store, False), store, train)
        self.row(f"dcp.load, {name}, delta", lambda: self.load(store))

    def load(self, store: Path, state: dict[str, Any] | None = None) -> None:
        into = self.state if state is None else state
        dcp.load(into, storage_reader=StorageReader(store), planner=LoadPlanner())

    def fresh(self) -> Path:
        self.step += 1
        return self.folder / f"stock-{self.step}"

    def writer(self, store: Path, base: bool) -> StorageWriter:
        self.step += 1
        preset = store.name if store.name in ("fast", "balanced") else "balanced"
        return StorageWriter(store, step=self.step, base=base, preset=preset)

    def save(self, store: Path, base: bool) -> None:
        dcp.save(self.state, storage_writer=self.writer(store, base))

    def row(
        self,
        name: str,
        call: Callable[[], object],
        where: Path | None = None,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        if not any(part in name for part in self.only):
            return
        times = []
        for _ in range(ROUNDS + 1):
            before()
            times.append(self.timed(call))
        self.note(name, min(times[1:]), None, where, times)

    def background(self, name: str, arguments: Callable[[], dict[str, Any]]) -> None:
        if not any(part in name for part in self.only):
            return
        blocked, whole = [], []
        for _ in range(ROUNDS + 1):
            given = arguments()
            futures: list[Any] = []
            started = time.perf_counter()
            blocked.append(
                self.timed(
                    lambda given=given, futures=futures: futures.append(
                        dcp.async_save(
                            self.state,
                            process_group=self.behind,
                            async_checkpointer_type=AsyncCheckpointerType.THREAD,
                            **given,
                        )
                    )
                )
            )
            # Asynchronous staging has its own future; then the caller may change its tensors.
            staging = getattr(futures[0], "staging_completion", None)
            if staging is not None:
                staging.result()
                blocked[-1] = max(blocked[-1], time.perf_counter() - started)
            getattr(futures[0], "upload_completion", futures[0]).result()
            dist.barrier()
            whole.append(time.perf_counter() - started)
        self.note(name, min(whole[1:]), min(blocked[1:]), None, whole)

    def timed(self, call: Callable[[], object]) -> float:
        """Seconds of the slowest rank."""
        self.settle()
        started = time.perf_counter()
        call()
        self.settle()
        seconds = torch.tensor(time.perf_counter() - started)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def note(
        self,
        name: str,
        whole: float,
        blocked: float | None,
        where: Path | None,
        rounds: list[float] | None = None,
    ) -> None:
        if dist.get_rank():
            return
        stored = None
        if where is not None and where.name in ("fast", "balanced"):
            stored = s4weights.CheckpointStore(where).list()[-1].bytes
        elif where is not None:
            stored = sum(f.stat().st_size for f in where.rglob("*") if f.is_file())
        self.rows.append(
            {"row": name, "whole_s": whole, "blocked_s": blocked, "bytes": stored}
            | ({} if rounds is None else {"rounds_s": rounds})
        )
        self.print(self.rows[-1:])

    def print(self, rows: list[dict[str, Any]] | None = None) -> None:
        for row in self.rows if rows is None else rows:
            blocked = "" if row["blocked_s"] is None else f"{row['blocked_s']:9.3f}"
            stored = "" if row["bytes"] is None else f"{row['bytes'] / 1e9:8.3f} GB"
            print(f"{row['row']:40} {row['whole_s']:9.3f} s {blocked:9} {stored}", flush=True)


if __name__ == "__main__":
    main()
