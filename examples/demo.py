"""Kill a training run, resume it from its newest checkpoint, and look for a difference.

`cargo xtask demo` runs this. Three runs of examples/train_gpt.py: one unbroken, one that kills
itself half way, one that resumes it. The first and the last must end in the same bits. The last
checkpoint is then written with other tools too, for a table of sizes and times. Finally, the same
is done with checkpoint stores, in a folder and on an S3 server (`demo_store.py`), and with a runner
that takes over checkpoints (`demo_runner.py`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import zstandard
from demo_runner import with_runner
from demo_store import Demo
from same import check, differences, leaves

import s4weights

STEPS, SAVE_EVERY, KILL_IN = 60, 5, 37
TRAIN = Path(__file__).with_name("train_gpt.py")


def tensor_bytes(tree: object) -> int:
    """The bytes of a state's tensors; tensors that share memory count once."""
    tensors = (value for _, value in leaves(tree) if isinstance(value, torch.Tensor))
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


COMMAND = [sys.executable, str(TRAIN), "--steps", str(STEPS), "--save-every", str(SAVE_EVERY)]


def train(folder: Path, *, final: Path | None = None, kill_in: int = 0) -> int:
    """Runs the training script; returns its exit code."""
    command = [*COMMAND, "--checkpoints", str(folder), "--kill-in-step", str(kill_in)]
    command += ["--final", str(final)] if final else []
    return subprocess.run(command, check=False).returncode


# One row of the table: writes a state to a path; reads it back.
Tool = tuple[Callable[[dict, Path], None], Callable[[Path], object]]


def torch_tool() -> Tool:
    return torch.save, lambda path: torch.load(path, weights_only=True)


def zstd_tool() -> Tool:
    def save(state: dict, path: Path) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        path.write_bytes(zstandard.ZstdCompressor(level=3).compress(buffer.getbuffer()))

    def load(path: Path) -> object:
        plain = zstandard.ZstdDecompressor().decompress(path.read_bytes())
        return torch.load(io.BytesIO(plain), weights_only=True)

    return save, load


def zipnn_tool() -> Tool:
    """ZipNN codes fp32 tensors separately, tied ones once; torch keeps the rest of the state."""
    from zipnn import ZipNN

    coder = ZipNN(input_format="torch")

    def save(state: dict, path: Path) -> None:
        coded, names, rest = {}, {}, {}
        for place, value in leaves(state):
            if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
                rest[place] = value
                continue
            name = names.setdefault(value.data_ptr(), place)
            if name == place:
                # A copy, since ZipNN reorders the bits of its input in place.
                blob = coder.compress(value.clone().reshape(-1))
                coded[place] = (torch.frombuffer(bytearray(blob), dtype=torch.uint8), value.shape)
            else:
                rest[place] = ("tied", name)
        torch.save((coded, rest), path)

    def load(path: Path) -> object:
        coded, flat = torch.load(path, weights_only=True)
        for place, (blob, shape) in coded.items():
            flat[place] = coder.decompress(blob.numpy().tobytes()).reshape(shape)
        for place, value in flat.items():
            if isinstance(value, tuple):
                flat[place] = flat[value[1]]
        return {place.removeprefix("/"): value for place, value in flat.items()}

    return save, load


def s4weights_tool(preset: str) -> Tool:
    return lambda state, path: s4weights.save(state, path, preset=preset), s4weights.load


def best(repeat: int, action: Callable[[], object]) -> float:
    """The shortest of some runs, in seconds."""
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return min(times)


def table(state: dict, folder: Path) -> bool:
    """Prints a row for each tool's file of the state; returns whether all gave the state back."""
    tools: list[tuple[str, Callable[[], Tool]]] = [
        ("torch.save", torch_tool),
        ("torch.save + zstd -3", zstd_tool),
        ("ZipNN, tensor by tensor", zipnn_tool),
        ("s4weights, fast", lambda: s4weights_tool("fast")),
        ("s4weights, balanced", lambda: s4weights_tool("balanced")),
    ]
    print(f"  {'':<24}{'bytes':>12}{'ratio':>8}{'save':>10}{'load':>10}")
    path, reference, all_same = folder / "table.bin", 0, True
    for name, make in tools:
        try:
            save, load = make()
        except ImportError:
            print(f"  {name:<24}  could not be installed on this machine")
            continue
        save_time = best(5, lambda save=save: save(state, path))
        load_time = best(5, lambda load=load: load(path))
        size = path.stat().st_size
        reference = reference or size
        milliseconds = f"{save_time * 1e3:>7.0f} ms{load_time * 1e3:>7.0f} ms"
        same = not differences(state, load(path))
        note = "" if same else "  NOT THE SAME STATE"
        print(f"  {name:<24}{size:>12,}{reference / size:>8.3f}{milliseconds}{note}")
        path.unlink()
        all_same &= same
    return all_same


def with_stores(folder: Path, args: argparse.Namespace, unbroken: object) -> list[bool]:
    """Trains with stores; returns whether each run ended as it must."""
    kill_in = (KILL_IN // SAVE_EVERY) * SAVE_EVERY
    demo = Demo(COMMAND, folder / "unbroken", kill_in, kill_in - SAVE_EVERY)
    print(f"\n6. With a checkpoint store in a folder, killed while step {kill_in} is saved")
    done = [demo.run(str(folder / "store"), {}, folder / "store.pt", unbroken)]
    if not args.s3:
        print("\n7. No S3 server was named: `cargo xtask demo` starts one")
        return done
    print("\n7. The same over S3's protocol")
    # For servers that check no credentials.
    options = {"endpoint_url": args.s3, "key": "test", "secret": "test", "region": "us-east-1"}
    url = f"s3://{args.bucket}/demo-{time.time_ns()}"
    return [*done, demo.run(url, options, folder / "s3.pt", unbroken)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(".demo"))
    parser.add_argument("--s3", help="endpoint of an S3 server that checks no credentials")
    parser.add_argument("--bucket", default="s4test")
    parser.add_argument("--program", help="the native `s4w`, which has `serve`")
    args = parser.parse_args()
    folder: Path = args.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    print(f"\n1. A small GPT, AdamW, {STEPS} steps, a checkpoint every {SAVE_EVERY}: unbroken")
    if train(folder / "unbroken", final=folder / "unbroken.pt") != 0:
        return 1
    print(f"\n2. The same, but it kills itself in step {KILL_IN}")
    if train(folder / "killed", kill_in=KILL_IN) != -signal.SIGKILL:
        print("  it was not killed")
        return 1
    saved = sorted(path.name for path in (folder / "killed").iterdir())
    print(f"  left behind: {', '.join(saved)}")
    print("\n3. Resumed from the newest checkpoint")
    if train(folder / "killed", final=folder / "resumed.pt") != 0:
        return 1

    print("\n4. Is anything different?")
    last = f"step-{STEPS:06}.s4w"
    unbroken = torch.load(folder / "unbroken.pt", weights_only=True)
    resumed = torch.load(folder / "resumed.pt", weights_only=True)
    same = [
        check(f"all {STEPS} losses", unbroken["losses"], resumed["losses"]),
        check("the last state of both runs, every byte", unbroken, resumed),
        check(f"{last} as s4weights loads it", s4weights.load(folder / "killed" / last), resumed),
    ]

    size = tensor_bytes(unbroken)
    version = importlib.metadata.version("s4weights")
    cores = os.cpu_count()
    print(f"\n5. The last checkpoint: {size:,} bytes of tensors (s4weights {version}, {cores} cores)")
    same.append(table(unbroken, folder))
    same += with_stores(folder, args, unbroken)
    if args.s3 and args.program:
        print("\n8. With a runner, which trainers hand their checkpoints to: both are killed")
        options = {"endpoint_url": args.s3, "key": "test", "secret": "test", "region": "us-east-1"}
        url = f"s3://{args.bucket}/runner-{time.time_ns()}"
        same.append(with_runner(COMMAND, args.program, folder, url, options, KILL_IN, unbroken))
    else:
        print("\n8. With a runner: `cargo xtask demo` names its program and an S3 server")
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
