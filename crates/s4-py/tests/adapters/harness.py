"""What the tests of adapters share: processes that are killed, and the code of the guide pages."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GUIDES = HERE.parents[3] / "docs/adapters"

#: Seconds for the processes of all frameworks.
PATIENCE = 300

#: Imports once what takes seconds to import, then lives through one call after the other in a
#: process of its own.
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


def die() -> None:
    """Ends this process as a power cut would: no handler, no `finally`, no exit."""
    os.kill(os.getpid(), signal.SIGKILL)


def run_victims(*calls: tuple[str, ...]) -> None:
    """Runs ``(module, function, *arguments)``, each in a process that must be killed."""
    paths = [str(HERE), str(HERE.parent)]
    command = [sys.executable, "-c", _VICTIMS, json.dumps(paths), json.dumps(calls)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr


def run_guide(page: str, names: dict[str, Any]) -> dict[str, Any]:
    """Runs the Python code of a guide page, as one program that is given these names."""
    text = (GUIDES / page).read_text(encoding="utf-8")
    code = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert code, f"{page} has no code"
    exec(compile("\n".join(code), page, "exec"), names)
    return names
