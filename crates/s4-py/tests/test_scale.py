"""Many small tensors, and the memory that saving and loading take."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from compare import assert_identical


def fastest(*calls: Any, rounds: int = 8) -> list[float]:
    """Seconds of the fastest run of each call. They take turns: other processes only ever add, to all alike."""
    seconds = [float("inf")] * len(calls)
    for _ in range(rounds):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            seconds[i] = min(seconds[i], time.perf_counter() - start)
    return seconds


@pytest.mark.parametrize("form", ["tree", "pickle"])
def test_ten_thousand_small_tensors(form: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    obj: dict[str, Any] = {
        "state": {i: {"step": torch.tensor(float(i))} for i in range(5000)},
        "weights": {f"layers.{i}.bias": torch.randn(16, generator=generator) for i in range(5000)},
    }
    if form == "pickle":
        obj["other"] = range(2)
    ours, theirs = tmp_path / "a.s4w", tmp_path / "a.pt"
    save = fastest(lambda: s4weights.save(obj, ours), lambda: torch.save(obj, theirs))
    load = fastest(
        lambda: s4weights.load(ours, weights_only=False),
        lambda: torch.load(theirs, weights_only=False),
    )
    sizes = ours.stat().st_size, theirs.stat().st_size
    print(f"{form}: save {save}, load {load} s, size {sizes}")
    assert_identical(obj, s4weights.load(ours, weights_only=False))
    assert sizes[0] < sizes[1]
    if not os.environ.get("CI"):  # Timing on shared machines proves nothing.
        assert save[0] < 2 * save[1] and load[0] < 2 * load[1]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("threads", [1, 8])
def test_memory(threads: int, path: Path) -> None:
    script = """
import sys, threading, time, torch, s4weights
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
def peak(work):
    start, top, stop = resident(), [0], threading.Event()
    def watch():
        while not stop.is_set():
            top[0] = max(top[0], resident()); time.sleep(0.001)
    thread = threading.Thread(target=watch); thread.start()
    result = work(); stop.set(); thread.join()
    return top[0] - start, result
obj = {"w": torch.randn(64 << 20), "x": torch.zeros(32 << 20)}
s4weights.save({"w": torch.ones(1 << 20)}, sys.argv[1])
saving, _ = peak(lambda: s4weights.save(obj, sys.argv[1], threads=int(sys.argv[2])))
del obj
loading, obj = peak(lambda: s4weights.load(sys.argv[1], threads=int(sys.argv[2])))
print(saving >> 20, (loading >> 20) - 384)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(path), str(threads)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    saving, loading = map(int, done.stdout.split())
    print(f"{threads} threads: MiB over the tensors: save {saving}, load {loading}")
    assert saving < 256 and loading < 256


def test_storages_of_other_devices_are_staged_in_parts(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    """Without a GPU: any storage that is not on the CPU is copied, a bounded part at a time."""
    from s4weights import _storages

    live = {"now": 0, "most": 0}

    class Device:
        type = "elsewhere"

    class Remote:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor, self.device, self._cdata = tensor, Device, id(self)

        def nbytes(self) -> int:
            return self.tensor.untyped_storage().nbytes()

        def cpu(self) -> Any:
            copy = self.tensor.clone().untyped_storage()
            live["now"] += copy.nbytes()
            live["most"] = max(live["most"], live["now"])
            return copy

    monkeypatch.setattr(_storages, "STAGING_BYTES", 1000)
    storages = _storages.StorageWriter()
    tensors = [torch.full((50,), float(i)) for i in range(20)] + [torch.full((500,), 20.0)]
    for i, tensor in enumerate(tensors):
        hint = _storages.Hint(f"t{i}", torch.float32, tuple(tensor.shape))
        storages.number(Remote(tensor), lambda hint=hint: hint)  # type: ignore[arg-type]
    stream = io.BytesIO()
    native = s4weights._save._core.Writer(None, None, stream, "fast", None, {})
    parts = []

    class Writer:
        def write_sources(self, engine: Any, sources: Any, first: int, end: int, progress: Any) -> None:
            parts.append(end - first)
            native.write_sources(engine, sources, first, end, progress)
            live["now"] = 0

    writer: Any = Writer()
    compute = s4weights._save.Compute("auto", None)
    storages.write(writer, s4weights._save.Progress(None, 6000, "save"), compute)
    native.finish(None, {}, {})
    assert parts == [5, 5, 5, 5, 1] and live["most"] == 2000
    loaded = s4weights.load(io.BytesIO(stream.getvalue()))
    assert_identical(tensors, list(loaded.values()))
