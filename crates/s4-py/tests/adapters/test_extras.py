"""Every adapter has an extra, a guide page, and says what it needs."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import s4weights
from harness import GUIDES, HERE
from s4weights.adapters._common import require

FOLDER = Path(s4weights.__file__).parent / "adapters"
NAMES = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))


def test_there_are_some() -> None:
    assert {"lightning", "transformers", "accelerate", "deepspeed", "torchtitan"} <= {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_without_its_framework(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(distribution: str) -> str:
        raise importlib.metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    module = f"s4weights.adapters.{name}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    before = {*sys.modules}
    with pytest.raises(
        ImportError,
        match=rf"{module} needs .*: in a checkout, run pip install '\./crates/s4-py\[{name}\]'$",
    ):
        importlib.import_module(module)
    # The error comes before anything large is imported.
    assert not {name for name in {*sys.modules} - before if not name.startswith("s4weights")}


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_has_an_extra_and_a_page(name: str) -> None:
    rules = (HERE.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(rf'^{name} = \[.*"torch>=2\.6"', rules, re.MULTILINE)
    assert f"./crates/s4-py[{name}]" in (GUIDES / f"{name}.md").read_text(encoding="utf-8")
    assert f"({name}.md)" in (GUIDES / "README.md").read_text(encoding="utf-8")


def test_a_version_that_is_too_old() -> None:
    require("torch", "2.6", "torch")
    require("torch", "2.6", "nothing", "torch")
    with pytest.raises(ImportError, match=r"needs torch 999 or later \(torch 2\.[\d.+a-z]+ is "):
        require("torch", "999", "torch")


def test_s4weights_imports_no_adapter() -> None:
    script = "import sys, s4weights; sys.exit(any('adapters' in name for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
