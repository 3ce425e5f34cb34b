"""Fixtures."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test may save a file."""
    return tmp_path / "checkpoint.s4w"
