"""Preset ``nvcomp``: a round trip with a GPU and nvCOMP, else errors that say what is missing."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
import torch

import s4weights


def test_preset_nvcomp_round_trips_or_says_what_it_needs(tmp_path: Path) -> None:
    state = {"w": torch.randn(300, 700).bfloat16(), "ids": torch.arange(9000)}
    path = tmp_path / "a.s4w"
    try:
        s4weights.save(state, path, preset="nvcomp")
    except s4weights.UnsupportedFormatError as error:
        assert os.environ.get("S4_REQUIRE_GPU") != "1", error
        assert "GPU" in str(error) and "nvidia-libnvcomp-cu12" in str(error)
        assert not path.exists()
        return
    with pytest.raises(s4weights.UnsupportedFormatError, match="trusted=True"):
        s4weights.load(path)
    back = s4weights.load(path, trusted=True)
    assert torch.equal(back["w"], state["w"]) and torch.equal(back["ids"], state["ids"])
    assert s4weights.verify(path, trusted=True)["tensors"] == 2


def test_trust_changes_nothing_for_open_files(tmp_path: Path) -> None:
    path, stream = tmp_path / "a.s4w", io.BytesIO()
    state = {"w": torch.randn(5000)}
    s4weights.save(state, path)
    s4weights.save(state, stream)
    stream.seek(0)
    for source in (path, stream):
        assert torch.equal(s4weights.load(source, trusted=True)["w"], state["w"])
    s4weights.verify(path, trusted=True)
