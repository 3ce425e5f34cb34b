"""What users call: saves and loads of files, streams and stores, with one thread, two and all.

    python benches/calls.py --data testdata [--mb 256] [--tensors 20000] [--repeat 5] [--out FOLDER]

There are three states. The large one repeats the data's tensors under new names up to the requested
size. Each repetition changes the low bits of the mantissas, which are noise (exact copies would be
stored as such). The second has as many bytes, in 60 tensors of a mixed-precision training: bf16
weights, which are rounded copies, fp32 weights and the moments of AdamW. The third has many small
tensors. Files and stores are in a memory file system if
there is one. Other tools are measured beside ours: torch, safetensors (whose tensors are a mapped
file until they are read, so every page is touched), ZipNN on buffers, and a clone of the state,
which only fills new memory. The best of several runs counts, and what comes back is compared with
what went in (except for ZipNN). `calls.json` and `calls.md` are written to the folder of `--out`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from peer_files import MEMORY_FILES, same
from peers import processor
from staging import make_state

import s4weights

State = dict[str, torch.Tensor]


class Call(NamedTuple):
    """A row of the results: what is timed, and how it is prepared and checked."""

    what: str
    tool: str
    threads: int
    run: Callable[[], Any]
    #: Called before each run, not timed.
    prepare: Callable[[], object] = lambda: None
    #: What `run` must return; not checked if `None`.
    expected: State | None = None


def large_state(files: list[Path], nbytes: int) -> State:
    """The tensors of some files, repeated until they have `nbytes` bytes."""
    originals = [(k, t) for path in files for k, t in safetensors.torch.load_file(path).items()]
    state: State = {}
    total = 0
    generator = torch.Generator().manual_seed(1)
    while total < nbytes:
        for name, tensor in originals:
            state[f"{len(state)}.{name}"] = with_other_noise(tensor, generator)
            total += tensor.nbytes
    return state


def with_other_noise(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A copy with other low bits in the mantissas."""
    integers = {2: (torch.int16, 5), 4: (torch.int32, 16)}.get(tensor.element_size())
    if integers is None or not tensor.is_floating_point():
        return tensor.clone()
    dtype, bits = integers
    noise = torch.randint(1 << bits, tensor.shape, dtype=dtype, generator=generator)
    return (tensor.view(dtype) ^ noise).view(tensor.dtype)


def training_state(nbytes: int) -> State:
    """bf16 weights, fp32 weights and moments after some steps of AdamW, in 60 tensors."""
    state = make_state(nbytes / 1e9, 60, "cpu")
    out = dict(state["model"])
    for i, slot in state["optimizer"]["state"].items():
        out |= {f"optimizer.{i}.{name}": tensor for name, tensor in slot.items()}
    return out


def small_state(count: int) -> State:
    """`count` weights of 256 values each."""
    generator = torch.Generator().manual_seed(1)
    return {f"layers.{i}.weight": torch.randn(16, 16, generator=generator) for i in range(count)}


def touched(state: State) -> State:
    """The tensors of a mapped file, once every page has been read."""
    for tensor in state.values():
        tensor.reshape(-1).view(torch.uint8)[::4096].sum()
    return state


def file_calls(state: State, folder: Path, threads: list[int]) -> Iterator[Call]:
    """Saves and loads of files."""
    path = {tool: folder / tool for tool in ("torch", "safetensors", "s4weights")}
    torch.save(state, path["torch"])
    safetensors.torch.save_file(state, path["safetensors"])
    s4weights.save(state, path["s4weights"])
    target = folder / "target"
    yield Call("clone", "torch", 1, lambda: {k: t.clone() for k, t in state.items()})
    yield Call("save a file", "torch", 1, lambda: torch.save(state, target))
    yield Call(
        "save a file", "safetensors", 1, lambda: safetensors.torch.save_file(state, target)
    )
    for n in threads:
        yield Call("save a file", "s4weights", n, lambda n=n: s4weights.save(state, target, threads=n))
    yield Call("load a file", "torch", 1, lambda: torch.load(path["torch"]), expected=state)
    yield Call(
        "load a file",
        "safetensors, pages touched",
        1,
        lambda: touched(safetensors.torch.load_file(path["safetensors"])),
        expected=state,
    )
    into = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    for n in threads:
        load = lambda n=n: s4weights.load(path["s4weights"], threads=n)  # noqa: E731
        yield Call("load a file", "s4weights", n, load, expected=state)

        def load_into(n: int = n) -> State:
            s4weights.load_into(into, path["s4weights"], threads=n)
            return into

        yield Call("load_into a file", "s4weights", n, load_into, expected=state)


def stream_calls(state: State, threads: list[int]) -> Iterator[Call]:
    """Saves to and loads from `BytesIO`, and ZipNN's buffers."""
    stored = {"torch": io.BytesIO(), "s4weights": io.BytesIO()}
    torch.save(state, stored["torch"])
    s4weights.save(state, stored["s4weights"])

    def load(tool: str, **options: Any) -> State:
        stored[tool].seek(0)
        return (torch if tool == "torch" else s4weights).load(stored[tool], **options)

    yield Call("save to BytesIO", "torch", 1, lambda: torch.save(state, io.BytesIO()))
    for n in threads:
        save = lambda n=n: s4weights.save(state, io.BytesIO(), threads=n)  # noqa: E731
        yield Call("save to BytesIO", "s4weights", n, save)
    yield Call("load from BytesIO", "torch", 1, lambda: load("torch"), expected=state)
    for n in threads:
        yield Call(
            "load from BytesIO", "s4weights", n, lambda n=n: load("s4weights", threads=n), expected=state
        )
    for n in threads:
        yield from zipnn_calls(state, n)


def zipnn_calls(state: State, threads: int) -> Iterator[Call]:
    """ZipNN, tensor by tensor, from and to memory."""
    try:
        from zipnn import ZipNN
    except ImportError:
        return
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
    coders = {
        dtype: ZipNN(input_format="byte", bytearray_dtype=name, threads=threads)
        for dtype, name in names.items()
    }
    tensors = [(t.dtype, t.reshape(-1).view(torch.uint8).numpy()) for t in state.values()]
    if any(dtype not in coders for dtype, _ in tensors):
        return
    given: list[bytearray] = []

    def copy() -> None:
        # ZipNN reorders the bits of its input in place.
        given[:] = [bytearray(values) for _, values in tensors]

    def encode() -> list[bytes]:
        return [coders[d].compress(v) for (d, _), v in zip(tensors, given, strict=True)]

    copy()
    coded = encode()
    yield Call("save to BytesIO", "ZipNN, buffers", threads, encode, copy)

    def decode() -> list[bytes]:
        return [coders[d].decompress(c) for (d, _), c in zip(tensors, coded, strict=True)]

    yield Call("load from BytesIO", "ZipNN, buffers", threads, decode)


def store_calls(state: State, folder: Path, threads: list[int]) -> Iterator[Call]:
    """Saves to and loads from a store: a base, and a delta of one step."""
    later = {name: step(tensor) for name, tensor in state.items()}
    for n in threads:
        place = folder / f"store-{n}"
        stores: list[s4weights.CheckpointStore] = []
        steps = iter(range(1 << 30))

        def fresh(place: Path = place, stores: list = stores, n: int = n, steps: Any = steps) -> None:
            """Starts a new store with a base, the parent of the next delta."""
            for old in stores:
                old.close()
            shutil.rmtree(place, ignore_errors=True)
            stores[:] = [s4weights.CheckpointStore(place, threads=n)]
            stores[0].save_checkpoint(state, next(steps), base=True)

        def save(
            what: State, base: bool, stores: list = stores, steps: Any = steps
        ) -> s4weights.CheckpointEntry:
            return stores[0].save_checkpoint(what, next(steps), base=base)

        yield Call("save a base", "s4weights", n, lambda save=save: save(state, True), fresh)
        yield Call("save a delta", "s4weights", n, lambda save=save: save(later, False), fresh)
        fresh()
        base, delta = stores[0].latest(), save(later, False).step
        load = lambda at, stores=stores: stores[0].load_checkpoint(at)  # noqa: E731
        yield Call("load a base", "s4weights", n, lambda load=load, at=base: load(at), expected=state)
        yield Call(
            "load a delta", "s4weights", n, lambda load=load, at=delta: load(at), expected=later
        )
        stores[0].close()
        shutil.rmtree(place, ignore_errors=True)


def step(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor after a small update of most values."""
    if not tensor.is_floating_point():
        return tensor
    return (tensor.float() * (1 + 2e-4 * torch.randn(tensor.shape))).to(tensor.dtype)


def measure(calls: Iterator[Call], nbytes: int, repeat: int) -> list[dict[str, Any]]:
    """The best of `repeat` runs of each call."""
    rows = []
    for call in calls:
        times = []
        for _ in range(repeat):
            call.prepare()
            started = time.perf_counter()
            back = call.run()
            times.append(time.perf_counter() - started)
        if call.expected is not None and not all(
            same(back[name], tensor) for name, tensor in call.expected.items()
        ):
            raise SystemExit(f"{call.what}, {call.tool}: came back different")
        del back
        rows.append(
            {
                "what": call.what,
                "tool": call.tool,
                "threads": call.threads,
                "seconds": min(times),
                "gb_s": nbytes / min(times) / 1e9,
            }
        )
        print(f"  {call.what}, {call.tool}, {call.threads}: {min(times):.4f} s", flush=True)
    return rows


def markdown(results: dict[str, Any]) -> str:
    """A table for each state, with the speed of each row relative to torch's."""
    parts = [
        f"{results['processor']}, {results['cores']} cores, PyTorch {results['torch']} with one thread; "
        f"best of {results['repeat']} runs; GB/s (1e9) of raw bytes. Made by `cargo xtask bench`."
    ]
    for state in results["states"]:
        base = {r["what"]: r["seconds"] for r in state["rows"] if r["tool"] == "torch"}
        lines = [
            f"### {state['tensors']} tensors, {state['bytes'] / 1e6:.0f} MB",
            "",
            "| call | tool | threads | ms | GB/s | of torch |",
            "|---|---|---:|---:|---:|---:|",
        ]
        for row in state["rows"]:
            there = base.get(row["what"])
            times = "" if there is None else f"{there / row['seconds']:.2f}x"
            lines.append(
                f"| {row['what']} | {row['tool']} | {row['threads']} | {1e3 * row['seconds']:.1f} | "
                f"{row['gb_s']:.2f} | {times} |"
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of *.safetensors files")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--mb", type=int, default=256, help="size of the large states")
    parser.add_argument("--tensors", type=int, default=20_000, help="tensors of the last one")
    parser.add_argument("--repeat", type=int, default=5, help="runs; the best counts")
    parser.add_argument("--threads", type=int, nargs="*", help="1, 2 and all, unless told")
    args = parser.parse_args()
    files = sorted(args.data.glob("*.safetensors"))
    if not files:
        raise SystemExit(f"{args.data}: no *.safetensors files")
    # PyTorch's own copies would use all cores; other tools are measured with one thread.
    torch.set_num_threads(1)
    threads = args.threads or sorted({1, 2, os.cpu_count() or 1})
    results: dict[str, Any] = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "repeat": args.repeat,
        "states": [],
    }
    place = MEMORY_FILES if MEMORY_FILES.is_dir() else None
    nbytes = args.mb << 20
    for state in (large_state(files, nbytes), training_state(nbytes), small_state(args.tensors)):
        nbytes = sum(tensor.nbytes for tensor in state.values())
        print(f"{len(state)} tensors, {nbytes / 1e6:.0f} MB", flush=True)
        with tempfile.TemporaryDirectory(dir=place) as folder:
            rows = measure(file_calls(state, Path(folder), threads), nbytes, args.repeat)
            rows += measure(stream_calls(state, threads), nbytes, args.repeat)
            rows += measure(store_calls(state, Path(folder), threads), nbytes, args.repeat)
        results["states"].append({"tensors": len(state), "bytes": nbytes, "rows": rows})
    text = markdown(results)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "calls.json").write_text(json.dumps(results, indent=1) + "\n")
        (args.out / "calls.md").write_text(text)
    print(f"\n{text}")


if __name__ == "__main__":
    main()
