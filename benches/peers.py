"""Measure s4weights beside its peers: ratio, and speed in and out.

`cargo xtask bench` runs this. Each tensor of each *.safetensors file goes through each peer's own
API, in memory, in one process, one after another; the best of several runs counts, and every
result is compared with what went in. Writes peers.json, peers.md (its first table as summary.md
too) and peers.svg.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import peer_codecs
import peer_files
import peer_report

#: Seconds: a run that takes longer than `PATIENCE` is the last; shorter ones are repeated at least
#: until they add up to `ENOUGH`.
PATIENCE, ENOUGH = 1.0, 0.1

#: The dtypes that are measured: every peer supports them.
FLOATS = ("F32", "BF16", "F16")

Tensor = tuple[str, str, peer_codecs.Shape, np.ndarray]


def tensors(path: Path) -> Iterator[Tensor]:
    """Name, dtype, shape and bytes of each float tensor of a safetensors file."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__" and entry["dtype"] in FLOATS:
            first, last = entry["data_offsets"]
            values = np.frombuffer(data[start + first : start + last], np.uint8)
            yield name, entry["dtype"], tuple(entry["shape"]), values


def best(repeat: int, prepare: Callable[[], object], action: Callable) -> tuple[float, object]:
    """The shortest time of `action` on what `prepare` returns, and its last result."""
    times: list[float] = []
    while len(times) < repeat or sum(times) < ENOUGH:
        argument = prepare()
        started = time.perf_counter()
        outcome = action(argument)
        times.append(time.perf_counter() - started)
        if times[-1] > PATIENCE or len(times) >= 20 * repeat:
            break
    return min(times), outcome


def measure(peer: peer_codecs.Peer, tensor: Tensor, repeat: int) -> dict:
    """One tensor through one peer: sizes and times."""
    name, dtype, shape, values = tensor
    encode_s, blob = best(
        repeat, lambda: peer.prepare(values), lambda x: peer.encode(x, dtype, shape)
    )
    decode_s, back = best(repeat, lambda: blob, lambda x: peer.decode(x, values.nbytes, dtype))
    if bytes(back) != values.tobytes():
        raise SystemExit(f"{peer.name}: {name} came back different")
    return {
        "dtype": dtype,
        "bytes": values.nbytes,
        "coded": values.nbytes if peer.is_copy else len(blob),
        "encode_s": encode_s,
        "decode_s": decode_s,
    }


def total(rows: list[dict]) -> dict:
    """The sum over tensors, with ratio and speeds."""
    sums = {key: sum(row[key] for row in rows) for key in ("bytes", "coded", "encode_s", "decode_s")}
    return sums | {
        "ratio": sums["bytes"] / sums["coded"],
        "encode_gb_s": sums["bytes"] / sums["encode_s"] / 1e9,
        "decode_gb_s": sums["bytes"] / sums["decode_s"] / 1e9,
    }


def is_weight(name: str) -> bool:
    """Whether a tensor is a weight of the model, not a state of its optimizer."""
    return not name.startswith("optimizer.")


def by_dtype(rows: list[dict]) -> dict:
    return {d: total([r for r in rows if r["dtype"] == d]) for d in sorted({r["dtype"] for r in rows})}


def bench(peers: list[peer_codecs.Peer], files: list[Path], repeat: int) -> dict:
    """Every peer on every file: totals by file, and by dtype over all files and over weights alone.

    The peers take turns on each tensor, so that other load on the machine affects them alike.
    """
    rows: dict[str, dict[str, list[dict]]] = {peer.name: {} for peer in peers}
    weights: dict[str, list[dict]] = {peer.name: [] for peer in peers}
    for path in files:
        for tensor in tensors(path):
            for peer in peers:
                row = measure(peer, tensor, repeat)
                rows[peer.name].setdefault(path.stem, []).append(row)
                if is_weight(tensor[0]):
                    weights[peer.name].append(row)
        print(f"  measured: {path.name}", flush=True)
    return {
        peer.name: {
            "version": peer.version,
            "threads": peer.threads,
            "files": {name: total(held) for name, held in rows[peer.name].items()},
            "dtypes": by_dtype([row for held in rows[peer.name].values() for row in held]),
            "weights": by_dtype(weights[peer.name]),
        }
        for peer in peers
    }


def processor() -> str:
    """The processor's name, if the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of *.safetensors files")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5, help="runs at least; the best counts")
    parser.add_argument("--not-installable", action="append", default=[], metavar="PACKAGE")
    args = parser.parse_args()
    files = sorted(args.data.glob("*.safetensors"))
    if not files:
        print(f"{args.data}: no *.safetensors files")
        return 1

    peers, missing = peer_codecs.available(args.threads)
    missing |= {package.split("==")[0]: "could not be installed" for package in args.not_installable}
    results = {
        "machine": {"processor": processor(), "cores": os.cpu_count(), "system": platform.system()},
        "threads": args.threads,
        "repeat": args.repeat,
        "data": {path.stem: path.stat().st_size for path in files},
        "missing": missing,
        "tensors": bench(peers, files, args.repeat),
        "whole_files": peer_files.bench(files, args.threads, args.repeat),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    markdown = peer_report.markdown(results)
    (args.out / "peers.json").write_text(json.dumps(results, indent=1) + "\n")
    (args.out / "peers.md").write_text(markdown)
    (args.out / "summary.md").write_text(peer_report.summary(results) + "\n")
    (args.out / "peers.svg").write_text(peer_report.svg(results))
    print(f"\n{markdown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
