"""Calls within calls on a GPU, and beside the capture of CUDA graphs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from s4weights import CheckpointStore, S4Error

if os.environ.get("S4_REQUIRE_GPU") != "1" and not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


NESTED = """
import sys, torch, s4weights
path, inner = sys.argv[1:]
def weights(seed):
    return {"w": torch.randn(1 << 22, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))}
stored, did = path + "/stored", []
s4weights.save(weights(1), stored)
def nested(done, total):
    if inner == "save":
        s4weights.save(weights(1), path + "/inner")
    did.append(s4weights.load(path + "/inner" if inner == "save" else stored))
s4weights.save(weights(2), path + "/outer", progress=nested)
assert torch.equal(s4weights.load(path + "/outer", progress=nested)["w"], weights(2)["w"])
assert len(did) >= 2 and all(torch.equal(found["w"], weights(1)["w"]) for found in did)
"""


@pytest.mark.parametrize("inner", ["save", "load"])
def test_progress_may_use_the_same_gpu(inner: str, tmp_path: Path) -> None:
    """In a process of its own: a call that waits for the one around it would wait forever."""
    subprocess.run([sys.executable, "-c", NESTED, str(tmp_path), inner], timeout=90, check=True)


SIGTERM_IN_A_LOAD = """
import os, signal, sys, time
import torch, s4weights
url = sys.argv[1]
s4weights.save({"w": torch.randn(64 << 20, device="cuda")}, url + "/file")
store = s4weights.CheckpointStore(url + "/store")
store.save_checkpoint({}, 0)
state = {"w": torch.randn(256 << 20, device="cuda")}
def signaled(done, total):
    if done == 0 or signaled.sent:
        return
    signaled.sent = True
    store.save_checkpoint(state, 1, blocking=False, stage="device")
    os.kill(os.getpid(), signal.SIGTERM)
signaled.sent = False
with s4weights.finish_on_sigterm(store, 30):
    s4weights.load(url + "/file", progress=signaled)
    time.sleep(60)
"""


def test_sigterm_in_a_load_lets_a_background_save_finish(tmp_path: Path) -> None:
    started = time.monotonic()
    command = [sys.executable, "-c", SIGTERM_IN_A_LOAD, str(tmp_path)]
    assert subprocess.run(command, timeout=120, check=False).returncode == -signal.SIGTERM
    assert time.monotonic() - started < 30
    with CheckpointStore(tmp_path / "store") as store:
        assert [entry.step for entry in store.list()] == [0, 1]


@pytest.mark.parametrize("stage", ["device", "host", "lazy"])
def test_graphs_may_be_captured_while_a_save_runs(stage: Any, tmp_path: Path) -> None:
    """By default a capture forbids all threads of the process to allocate memory, for instance."""
    a = torch.randn(64, 64, device="cuda")
    torch.mm(a, a)  # The library's own memory is not allocated in a capture.
    with CheckpointStore(tmp_path) as store:
        for step in range(3):
            # Other sizes each time: nothing that the first save allocated is enough.
            state = {str(i): torch.randn(12 << (20 + step), device="cuda") for i in range(4)}
            torch.cuda.synchronize()
            pending = store.save_checkpoint(state, step, blocking=False, stage=stage)
            captures = 0
            while not pending.done() or captures == 0:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    b = torch.mm(a, a)
                    time.sleep(0.002)
                graph.replay()
                captures += 1
            pending.wait()
            torch.cuda.synchronize()
            assert torch.equal(b, torch.mm(a, a))
            stored = store.load_checkpoint(step)
            assert all(torch.equal(stored[name], values) for name, values in state.items())


def test_a_save_within_a_capture_is_refused(tmp_path: Path) -> None:
    """The values that the graph writes do not exist yet."""
    state = {"w": torch.randn(1 << 22, device="cuda")}
    graph = torch.cuda.CUDAGraph()
    with pytest.raises((S4Error, RuntimeError)), torch.cuda.graph(graph):
        state["w"].add_(1)
        s4weights.save(state, tmp_path / "file")
    torch.cuda.synchronize()
    s4weights.save(state, tmp_path / "file")
    assert torch.equal(s4weights.load(tmp_path / "file")["w"], state["w"])
