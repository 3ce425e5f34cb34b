"""The cost of a background save to a training loop, for each way of staging, compared with peers.

    python benches/staging.py [--gb 3] [--tensors 60 600 6000] [--out FOLDER] [--folder /dev/shm]
    python benches/staging.py --calls [--tensors 60 600 6000 20000]
    python benches/staging.py --tiny --device cpu

The state is bf16 weights with AdamW's master copy and moments in fp32, after some steps of
training. One run measures, for each number of tensors, how long the call blocks (base and delta,
each way of staging, the best of some saves after a first one) and how long the whole save takes,
and the same for a pinned copy, a clone on the GPU, `torch.save`, `dcp.async_save` and
`s4weights.save`. For one number of tensors it also measures, for each way of staging, how much
slower matrix products become during a save and how much time that is, how long the optimizer waits
after a forward and backward pass of 0.3 s, and memory. The last checkpoint of each store is compared bit for bit.

--calls instead measures saves and loads that block, of files and of a store.

Prints a table to stdout; --out also writes `staging.json` and `staging.md` to that folder.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from stock_stager import pinned_stager

import s4weights

State = dict[str, Any]

STAGES = ("device", "host", "lazy")
#: Seconds of the simulated forward and backward pass.
STEP_SECONDS = 0.3


class Bench:
    """Arguments, results, and what depends on the device."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device: str = arguments.device
        self.cuda = self.device.startswith("cuda")
        self.tiny: bool = arguments.tiny
        self.repeat: int = 1 if self.tiny else arguments.repeat
        self.deadline = time.monotonic() + arguments.seconds
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def timed(self, action: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds until a call returns, without what the device has left to do; and its result."""
        self.sync()
        start = time.perf_counter()
        out = action()
        return time.perf_counter() - start, out

    def done(self, action: Callable[[], Any]) -> float:
        """Seconds until a call and its work on the device are done; the best of some runs."""
        best = float("inf")
        for _ in range(max(2, self.repeat)):
            self.sync()
            start = time.perf_counter()
            out = action()
            self.sync()
            best = min(best, time.perf_counter() - start)
            del out
        return best

    def row(self, tensors: int, what: str, blocked: float | None, whole: float | None) -> None:
        self.rows.append({"tensors": tensors, "what": what, "blocked_s": blocked, "whole_s": whole})
        shown = ["-" if s is None else f"{s:.4f}" for s in (blocked, whole)]
        print(f"{tensors:>6} {what:<44} blocked {shown[0]:>8}  whole {shown[1]:>8}", file=sys.stderr)

    def is_late(self) -> bool:
        return time.monotonic() > self.deadline


def make_state(gigabytes: float, tensors: int, device: str) -> State:
    """A state with four tensors for each parameter: 14 bytes per value."""
    count = max(1, tensors // 4)
    values = int(gigabytes * 1e9 / 14 / count)
    columns = 1024 if values >= 1 << 16 else 64
    shape = (max(1, values // columns), columns)
    generator = torch.Generator(device).manual_seed(tensors)
    model, slots = {}, {}
    for i in range(count):
        master = torch.randn(shape, device=device, generator=generator) * 0.02
        slots[i] = {
            "master": master,
            "exp_avg": torch.zeros_like(master),
            "exp_avg_sq": torch.zeros_like(master),
        }
        model[f"layers.{i}.weight"] = master.bfloat16()
    groups = [{"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "params": list(range(count))}]
    state = {"model": model, "optimizer": {"state": slots, "param_groups": groups}, "step": 0}
    for _ in range(4):
        train(state)
    return state


def train(state: State) -> None:
    """A step of AdamW, in place, with gradients whose rows differ in scale."""
    slots = list(state["optimizer"]["state"].values())
    state["step"] += 1
    rows = torch.randn(slots[0]["master"].shape[0], 1, device=slots[0]["master"].device).exp()
    for slot, weight in zip(slots, state["model"].values(), strict=True):
        master, first, second = slot["master"], slot["exp_avg"], slot["exp_avg_sq"]
        gradient = torch.randn_like(master).mul_(rows).mul_(1e-4)
        first.mul_(0.9).add_(gradient, alpha=0.1)
        second.mul_(0.95).addcmul_(gradient, gradient, value=0.05)
        t = state["step"]
        update = (first / (1 - 0.9**t)) / ((second / (1 - 0.95**t)).sqrt() + 1e-8)
        master.mul_(1 - 3e-5).add_(update, alpha=-3e-4)
        weight.copy_(master)


def tensors_of(state: State) -> list[torch.Tensor]:
    slots = state["optimizer"]["state"].values()
    return [*state["model"].values(), *(t for slot in slots for t in slot.values())]


def same(a: State, b: State) -> bool:
    """Whether two states are the same, bit for bit."""
    pairs = zip(tensors_of(a), tensors_of(b), strict=True)
    return all(
        x.dtype == y.dtype
        and torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8).to(x.device))
        for x, y in pairs
    )


@contextlib.contextmanager
def new_folder(parent: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="staging-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure_yardsticks(bench: Bench, state: State, count: int) -> float:
    """Copies of the state. Returns the seconds of one to reused memory (pinned, with a GPU)."""
    tensors = tensors_of(state)
    kept = [torch.empty_like(t, device="cpu", pin_memory=bench.cuda) for t in tensors]

    def copy() -> None:
        for to, tensor in zip(kept, tensors, strict=True):
            to.copy_(tensor, non_blocking=True)

    pinned = bench.done(copy)
    bench.row(count, "pinned copy of the state", pinned, pinned)
    clone = bench.done(lambda: [t.clone() for t in tensors])
    bench.row(count, f"clone on the {'GPU' if bench.cuda else 'CPU'}", clone, clone)
    return pinned


def measure_peers(bench: Bench, state: State, count: int, parent: Path) -> None:
    with new_folder(parent) as folder:
        whole, _ = bench.timed(lambda: torch.save(state, folder / "0.pt"))
        bench.row(count, "torch.save", whole, whole)
    with new_folder(parent) as folder:
        times = []
        for i in range(bench.repeat + 1):
            seconds, _ = bench.timed(lambda i=i: s4weights.save(state, folder / f"{i}.s4w"))
            times.append(seconds)
        bench.row(count, "s4weights.save to a file", min(times[1:]), min(times[1:]))
    for stage in STAGES:
        with new_folder(parent) as folder:
            best = [float("inf")] * 2
            for i in range(bench.repeat + 1):
                start = time.perf_counter()
                path = folder / f"{i}.s4w"
                blocked, pending = bench.timed(
                    lambda p=path, s=stage: s4weights.save(state, p, blocking=False, stage=s)
                )
                pending.wait()
                if i > 0:
                    best = [min(best[0], blocked), min(best[1], time.perf_counter() - start)]
            bench.row(count, f"s4weights.save, background, {stage}", *best)
    try:
        measure_dcp(bench, state, count, parent)
    except Exception as error:  # Whatever a peer raises, the others can still be measured.
        bench.row(count, f"dcp.async_save failed: {type(error).__name__}: {error}", None, None)


def measure_dcp(bench: Bench, state: State, count: int, parent: Path) -> None:
    """DCP in the background: by default, and with PyTorch's recipe of pinned memory and overlap."""
    flat = {f"{i}": tensor for i, tensor in enumerate(tensors_of(state))}
    with new_folder(parent) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(1 if bench.tiny else 2):
            start = time.perf_counter()
            blocked, future = bench.timed(
                lambda i=i: dcp.async_save(flat, checkpoint_id=folder / f"plain{i}")
            )
            future.result()
            whole = time.perf_counter() - start
        bench.row(count, "dcp.async_save, default stager", blocked, whole)
        with pinned_stager(bench.cuda) as stager:
            for i in range(2):
                start = time.perf_counter()
                blocked, answer = bench.timed(
                    lambda i=i, stager=stager: dcp.async_save(
                        flat, checkpoint_id=folder / f"pinned{i}", async_stager=stager
                    )
                )
                staging = getattr(answer, "staging_completion", None)
                if staging is not None:
                    staging.result()
                staged = time.perf_counter() - start
                getattr(answer, "upload_completion", answer).result()
                whole = time.perf_counter() - start
        bench.row(count, "dcp.async_save, pinned and overlapped: call", blocked, whole)
        bench.row(count, "dcp.async_save, pinned and overlapped: staged", staged, whole)


def measure_calls(bench: Bench, state: State, count: int, parent: Path) -> None:
    """Calls that block: files and stores, saved after a step of training and loaded to the device."""
    where = {"map_location": bench.device}
    with new_folder(parent) as folder, s4weights.CheckpointStore(folder / "store") as store:
        path = folder / "file.s4w"
        times: dict[str, list[float]] = {}

        def run(what: str, call: Callable[[], Any]) -> Any:
            bench.sync()
            start = time.perf_counter()
            out = call()
            bench.sync()
            times.setdefault(what, []).append(time.perf_counter() - start)
            return out

        for i in range(3 * (bench.repeat + 1)):
            train(state)
            base = i <= bench.repeat
            if base:
                run("save", lambda: s4weights.save(state, path))
                run("load", lambda: s4weights.load(path, **where))
            kind = "base" if base else "delta"
            run(f"store, {kind}", lambda i=i, base=base: store.save_checkpoint(state, i, base=base))
            back = run(f"store, load of a {kind}", lambda: store.load_checkpoint(**where))
            if not same(state, back):
                raise SystemExit(f"{count} tensors, {kind}: what comes back differs")
            del back
    for what, seconds in times.items():
        # The first call of each kind prepares what later ones reuse.
        bench.row(count, f"blocking: {what}", min(seconds[1:]), min(seconds[1:]))


def measure_store(bench: Bench, state: State, count: int, parent: Path, stage: str) -> None:
    """A store: bases and deltas, each after a step of training."""
    best: dict[str, list[float]] = {}
    with new_folder(parent) as folder, s4weights.CheckpointStore(folder) as store:
        for i in range(2 + 2 * bench.repeat):
            train(state)
            base = i % 3 == 0 or i == 1
            start = time.perf_counter()
            blocked, pending = bench.timed(
                lambda i=i, base=base: store.save_checkpoint(
                    state, i, blocking=False, base=base, stage=stage
                )
            )
            start = time.perf_counter() - blocked
            pending.wait_staged()
            staged = time.perf_counter() - start
            entry = pending.wait()
            whole = time.perf_counter() - start
            if i > 0:  # The first save prepares what later ones reuse.
                old = best.get(entry.kind, [float("inf")] * 3)
                best[entry.kind] = [min(pair) for pair in zip(old, (blocked, staged, whole), strict=True)]
        if not same(state, store.load_checkpoint()):
            raise SystemExit(f"{count} tensors, {stage}: what comes back differs")
    for kind, (blocked, staged, whole) in sorted(best.items()):
        bench.row(count, f"store, {stage}, {kind}", blocked, whole)
        bench.rows[-1]["staged_s"] = staged
        bench.rows[-1]["stage"] = pending.stage


class Products:
    """Matrix products that stand for a training step."""

    def __init__(self, bench: Bench) -> None:
        n = 4096 if bench.cuda else 128
        dtype = torch.bfloat16 if bench.cuda else torch.float32
        self.bench = bench
        self.a = torch.randn(n, n, device=bench.device, dtype=dtype)
        self.out = torch.empty_like(self.a)
        #: How long the last run took.
        self.seconds = 0.0

    def run(self, stop: Callable[[], bool], at_least: float) -> float:
        """Average seconds of a product, run for at least `at_least` seconds and until `stop`."""
        done, start = 0, time.perf_counter()
        while True:
            for _ in range(20):
                torch.mm(self.a, self.a, out=self.out)
            self.bench.sync()
            done += 20
            elapsed = time.perf_counter() - start
            if elapsed >= at_least and stop():
                self.seconds = elapsed
                return elapsed / done


def measure_slowdown(bench: Bench, state: State, parent: Path, stage: str) -> None:
    """How much slower products become during saves, the time lost, and how long the optimizer waits."""
    products = Products(bench)
    least = 0.05 if bench.tiny else 0.4
    products.run(lambda: True, least)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    alone, beside, lost, waits = [], [], [], []
    with new_folder(parent) as folder, s4weights.CheckpointStore(folder) as store:
        store.save_checkpoint(state, 0)
        for i in range(1, 1 + 2 * bench.repeat):
            train(state)
            bench.sync()
            alone.append(products.run(lambda: True, least))
            pending = store.save_checkpoint(state, i, blocking=False, base=i % 2 == 1, stage=stage)
            pending.guard(optimizer)
            beside.append(products.run(pending.done, 0.0))
            lost.append(products.seconds * (1 - alone[-1] / beside[-1]))
            pending.wait()
            # In a separate save: how long the optimizer waits after a forward and backward pass.
            pending = store.save_checkpoint(state, i, blocking=False, base=i % 2 == 1, stage=stage)
            pending.guard(optimizer)
            products.run(lambda: True, 0.05 if bench.tiny else STEP_SECONDS)
            bench.sync()
            seconds, _ = bench.timed(optimizer.step)
            waits.append(seconds)
            pending.wait()
    median = [sorted(times)[len(times) // 2] for times in (alone, beside)]
    bench.facts[f"slowdown_percent, {stage}"] = 100 * (median[1] / median[0] - 1)
    bench.facts[f"lost_to_a_save_s, {stage}"] = sorted(lost)[len(lost) // 2]
    bench.facts[f"optimizer.step_s, {stage}"] = max(waits)


def measure_memory(bench: Bench, state: State, parent: Path, stage: str) -> None:
    """The peak memory of device and host that a save takes, sampled."""
    free: list[int] = []
    resident: list[int] = []
    stop = threading.Event()

    def sample() -> None:
        while not stop.is_set():
            if bench.cuda:
                free.append(torch.cuda.mem_get_info()[0])
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
            time.sleep(0.001)

    with new_folder(parent) as folder, s4weights.CheckpointStore(folder) as store:
        store.save_checkpoint(state, 0, blocking=False, stage=stage).wait()
        train(state)
        bench.sync()
        gc.collect()
        if bench.cuda:
            torch.cuda.empty_cache()
        thread = threading.Thread(target=sample)
        thread.start()
        time.sleep(0.02)
        store.save_checkpoint(state, 1, blocking=False, stage=stage).wait()
        stop.set()
        thread.join()
    bench.facts[f"host_bytes, {stage}"] = max(resident) - resident[0]
    if bench.cuda:
        bench.facts[f"device_bytes, {stage}"] = free[0] - min(free)


def table(bench: Bench) -> str:
    """The results as Markdown."""
    rows = bench.rows
    pinned = {r["tensors"]: r["blocked_s"] for r in rows if r["what"].startswith("pinned copy")}
    lines = ["| tensors | what | blocked, ms | of a pinned copy | whole, ms |", "|--:|---|--:|--:|--:|"]
    # Rows of peers that failed have no times.
    for r in (r for r in rows if r["blocked_s"] is not None and r["whole_s"] is not None):
        share = r["blocked_s"] / pinned[r["tensors"]]
        lines.append(
            f"| {r['tensors']} | {r['what']} | {1e3 * r['blocked_s']:.1f} | {share:.2f} | "
            f"{1e3 * r['whole_s']:.1f} |"
        )
    lines += ["", "| | |", "|---|--:|"]
    lines += [f"| {name} | {value:.4g} |" for name, value in bench.facts.items()]
    return "\n".join(lines)


def measure_background(
    bench: Bench, state: State, count: int, arguments: argparse.Namespace, is_middle: bool
) -> None:
    """Saves in the background; slowdown and memory only for the middle number of tensors."""
    for stage in STAGES:
        measure_store(bench, state, count, arguments.folder, stage)
    if is_middle and not bench.is_late():
        for stage in STAGES:
            measure_slowdown(bench, state, arguments.folder, stage)
            measure_memory(bench, state, arguments.folder, stage)
    if not (arguments.no_peers or bench.is_late()):
        measure_peers(bench, state, count, arguments.folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gb", type=float, default=3.0)
    parser.add_argument("--tensors", type=int, nargs="+", default=[60, 600, 6000])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=110.0, help="begin nothing new after them")
    parser.add_argument("--no-peers", action="store_true", help="stores only, no files and other tools")
    parser.add_argument("--calls", action="store_true", help="calls that block, and nothing else")
    parser.add_argument("--tiny", action="store_true", help="a small state: does it work?")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.gb, arguments.tensors = 0.004, [8, 40]
    bench = Bench(arguments)
    started = time.monotonic()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    middle = arguments.tensors[len(arguments.tensors) // 2]
    for count in arguments.tensors:
        if bench.is_late():
            print(f"no time for {count} tensors", file=sys.stderr)
            break
        state = make_state(arguments.gb, count, bench.device)
        measure_yardsticks(bench, state, count)
        if arguments.calls:
            measure_calls(bench, state, count, arguments.folder)
        else:
            measure_background(bench, state, count, arguments, count == middle)
        del state
        gc.collect()
        if bench.cuda:
            torch.cuda.empty_cache()
    dist.destroy_process_group()
    name = torch.cuda.get_device_name() if bench.cuda else "CPU"
    bench.facts["seconds"] = time.monotonic() - started
    out = {
        "device": name,
        "gb": arguments.gb,
        "torch": torch.__version__,
        "s4weights": s4weights.__version__,
        "cores": os.cpu_count(),
        "rows": bench.rows,
        "facts": bench.facts,
    }
    text = f"{arguments.gb} GB, {name}, PyTorch {torch.__version__}\n\n{table(bench)}\n"
    print(text)
    if arguments.out:
        (arguments.out / "staging.json").write_text(json.dumps(out, indent=1) + "\n")
        (arguments.out / "staging.md").write_text(text)


if __name__ == "__main__":
    main()
