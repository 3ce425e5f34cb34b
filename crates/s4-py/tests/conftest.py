"""Fixtures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before MKL is loaded, here and in processes that tests start: the last bits of a matrix product must not depend
# on addresses, since runs in different processes are compared bit by bit.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A place to which a test may save a file."""
    return tmp_path / "checkpoint.s4w"
