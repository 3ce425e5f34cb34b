"""Weights from a trainer to a sampler: bytes and seconds of a step, beside those of sending all.

    python benches/sync.py [--values N] [--steps N] [--folder DIR]

The trainer and the sampler are in this process; sockets use TCP on the loopback interface. The
rows are `Publisher.publish_delta` and `Subscriber.apply_delta` with their defaults, over the
socket and through a folder; and the plain way, `torch.save` to a socket, `torch.load`, and a copy
into the live parameters.
"""

from __future__ import annotations

import argparse
import io
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from s4weights.sync import Publisher, Subscriber

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from weight_sync import UPDATES, digest, weights


def send_all(state: dict[str, torch.Tensor], live: dict[str, torch.Tensor]) -> tuple[float, ...]:
    """Sends all weights: bytes, seconds to write them, seconds until they are applied, and 1."""
    start = time.perf_counter()
    stream = io.BytesIO()
    torch.save(state, stream)
    body = stream.getbuffer()
    written = time.perf_counter() - start
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(body)

        threading.Thread(target=serve).start()
        start = time.perf_counter()
        received = bytearray(len(body))
        with socket.create_connection(server.getsockname()) as connection:
            view, at = memoryview(received), 0
            while at < len(received):
                at += connection.recv_into(view[at:])
        with torch.no_grad():
            for name, tensor in torch.load(io.BytesIO(received)).items():
                live[name].copy_(tensor)
        return len(body), written, time.perf_counter() - start, 1.0


def deltas(
    arguments: argparse.Namespace, kind: str, listen: str | None, place: str
) -> list[tuple[float, ...]]:
    """Per step after the base: bytes, seconds to publish, to apply, share of values changed."""
    state, live = weights(arguments.values, 1), weights(arguments.values, 2)
    update = UPDATES[kind](state)
    found = []
    with (
        Publisher(place, listen=listen) as publisher,
        Subscriber(publisher.address or place, live) as subscriber,
    ):
        for step in range(arguments.steps + 1):
            before = [tensor.clone() for tensor in state.values()] if step else []
            if step:
                next(update)
            changed = sum(int((a != b).sum()) for a, b in zip(before, state.values(), strict=False))
            del before
            start = time.perf_counter()
            entry = publisher.publish_delta(state, step)
            published = time.perf_counter() - start
            start = time.perf_counter()
            done = subscriber.apply_delta()
            applied = time.perf_counter() - start
            assert done is not None and digest(live) == digest(state)
            if step:
                assert done.deltas == 1
                found.append((entry.bytes, published, applied, changed / arguments.values))
    return found


def middle(rows: list[tuple[float, ...]]) -> tuple[float, ...]:
    """The median of each column."""
    return tuple(sorted(column)[len(column) // 2] for column in zip(*rows, strict=True))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=64 << 20)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--folder", default="/dev/shm" if Path("/dev/shm").is_dir() else None)
    arguments = parser.parse_args()
    raw = 2 * arguments.values
    print(
        f"{raw:,} bytes of bf16, {torch.get_num_threads()} threads; medians of {arguments.steps} steps"
    )
    print(f"{'':30}{'changed':>9}{'bytes':>14}{'of raw':>9}{'write s':>9}{'apply s':>9}")

    def row(name: str, values: tuple[float, ...]) -> None:
        nbytes, written, applied, changed = values
        share = f"{100 * changed:>8.2f}%{int(nbytes):>14,}{100 * nbytes / raw:>8.2f}%"
        print(f"{name:30}{share}{written:>9.3f}{applied:>9.3f}")

    state, live = weights(arguments.values, 1), weights(arguments.values, 2)
    row(
        "all of them, torch.save, TCP",
        middle([send_all(state, live) for _ in range(arguments.steps)]),
    )
    assert digest(state) == digest(live)
    for kind in UPDATES:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            for how, listen, place in (
                ("TCP", "tcp://127.0.0.1:0", "memory:"),
                ("folder", None, f"{folder}/weights"),
            ):
                row(f"{kind}: delta, {how}", middle(deltas(arguments, kind, listen, place)))


if __name__ == "__main__":
    main()
