"""The package: annotations, public names, what it imports."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import s4weights
from s4weights import _core

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs mypy")
def test_mypy(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path)]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "python")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_stub_has_what_the_module_has() -> None:
    import ast

    stub = ast.parse((ROOT / "python/s4weights/_core.pyi").read_text(encoding="utf-8"))
    names = {node.name for node in stub.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert names == {name for name in vars(_core) if not name.startswith("__")}
    for node in stub.body:
        if isinstance(node, ast.FunctionDef):
            assert callable(getattr(_core, node.name))
        elif isinstance(node, ast.ClassDef):
            found = {name for name in vars(getattr(_core, node.name)) if not name.startswith("__")}
            stubbed = {f.name for f in node.body if isinstance(f, ast.FunctionDef)}
            assert found == {name for name in stubbed if not name.startswith("__")}


def test_public_names() -> None:
    assert all(hasattr(s4weights, name) for name in s4weights.__all__)
    assert s4weights.__version__ == _core.__version__
    assert (ROOT / "python/s4weights/py.typed").exists()


def test_checking_a_file_needs_no_torch(path: Path) -> None:
    s4weights.save({"w": torch.rand(10_000), "x": range(2)}, path)
    script = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from s4weights import inspect, verify\n"
        "print(verify(sys.argv[1])['tensors'], len(inspect(sys.argv[1])['tensors']))"
    )
    command = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() == ["1", "1"], done.stderr


def test_importing_does_not_import_torch() -> None:
    script = "import sys, s4weights; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
