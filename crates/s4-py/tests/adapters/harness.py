"""Shared by the tests of adapters: processes that are killed, and the code of the guide pages."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from in_time import free_port

# Here and in processes that are killed: sums and matrix products depend on how they are divided between threads.
torch.set_num_threads(1)

HERE = Path(__file__).parent
#: Where test modules are.
PATHS = [str(HERE), str(HERE / "on_request"), str(HERE.parent)]
GUIDES = HERE.parents[3] / "docs/adapters"

#: Seconds for the processes of all frameworks.
PATIENCE = 300

#: Imports once what takes seconds to import, then runs each call in its own process, one after
#: the other.
_VICTIMS = """
import importlib, json, os, sys
sys.path[:0] = json.loads(sys.argv[1])
calls = json.loads(sys.argv[2])
import torch._dynamo  # Two seconds, at the first optimizer.
modules = {call[0]: importlib.import_module(call[0]) for call in calls}
for module, name, *arguments in calls:
    child = os.fork()
    if child == 0:
        try:
            getattr(modules[module], name)(*arguments)
        finally:
            sys.stderr.flush()
            os._exit(1)
    ended = os.waitpid(child, 0)[1]
    if not (os.WIFSIGNALED(ended) and os.WTERMSIG(ended) == 9):
        sys.exit(f"{module}.{name} {arguments}: ended with {ended}, not by SIGKILL")
"""


class Layer(torch.nn.Module):
    """A linear layer without BLAS, which may choose other kernels in another process, or for other
    addresses: the last bits then differ.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.bias = torch.nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.unsqueeze(-2) * self.weight).sum(-1) + self.bias


def die() -> None:
    """Ends this process as a power cut would: no handler, no `finally`, no exit."""
    os.kill(os.getpid(), signal.SIGKILL)


def run_victims(*calls: tuple[str, ...]) -> None:
    """Runs ``(module, function, *arguments)``, each in a process that must be killed."""
    command = [sys.executable, "-c", _VICTIMS, json.dumps(PATHS), json.dumps(calls)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr


_RANK = """
import importlib, json, sys
sys.path[:0] = json.loads(sys.argv[1])
getattr(importlib.import_module(sys.argv[2]), sys.argv[3])(*sys.argv[4:])
"""


def run_ranks(world: int, module: str, function: str, *arguments: str) -> list[int]:
    """Runs a function of a test module in ``world`` processes, which find each other by the
    variables of ``torchrun``. Returns their exit codes.
    """
    command = [sys.executable, "-c", _RANK, json.dumps(PATHS), module, function, *arguments]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        # Compilation at run time needs programs that are installed next to Python.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "OMP_NUM_THREADS": "1",
    }
    ranks = []
    for rank in range(world):
        its = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(subprocess.Popen(command, env=its))
    try:
        return [process.wait(PATIENCE) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def run_guide(page: str, names: dict[str, Any]) -> dict[str, Any]:
    """Runs the Python code of a guide page as one program, with ``names`` as its globals."""
    text = (GUIDES / page).read_text(encoding="utf-8")
    code = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert code, f"{page} has no code"
    exec(compile("\n".join(code), page, "exec"), names)
    return names
