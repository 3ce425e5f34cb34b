"""Files of other formats go to their own readers."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch

import s4weights
from compare import assert_identical

OBJ = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}


@pytest.mark.parametrize("zipped", [True, False])
def test_torch_files(zipped: bool, path: Path) -> None:
    torch.save(OBJ, path, _use_new_zipfile_serialization=zipped)
    assert_identical(OBJ, s4weights.load(path))
    assert_identical(OBJ, s4weights.load(str(path), "cpu", weights_only=False))
    with open(path, "rb") as file:
        assert_identical(OBJ, s4weights.load(file))
    assert_identical(OBJ, s4weights.load(io.BytesIO(path.read_bytes())))
    meta = s4weights.load(path, map_location="meta")
    assert meta["a"].device.type == "meta"


def test_torch_files_keep_torch_rules(path: Path) -> None:
    torch.save({"a": range(3)}, path)
    with pytest.raises(pickle.UnpicklingError):
        s4weights.load(path)
    assert s4weights.load(path, weights_only=False) == {"a": range(3)}
    assert s4weights.load(path, mmap=True, weights_only=False) == {"a": range(3)}


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin"])
def test_safetensors_files(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    safetensors.torch.save_file(OBJ, path)
    assert_identical(dict(sorted(OBJ.items())), dict(sorted(s4weights.load(path).items())))
    loaded = s4weights.load(io.BytesIO(path.read_bytes()), torch.device("cpu"))
    assert loaded["b"].tolist() == [1, 1]
    for where in ({"cpu": "cpu"}, lambda storage, tag: storage):
        with pytest.raises(RuntimeError, match="safetensors"):
            s4weights.load(path, map_location=where)


def test_no_checkpoint_at_all(path: Path) -> None:
    for data in (b"hello", b"", b"not a checkpoint, whatever it is"):
        path.write_bytes(data)
        with pytest.raises(Exception) as expected:
            torch.load(path)
        with pytest.raises(expected.type):
            s4weights.load(path)


def test_verify_and_inspect_want_their_own_format(path: Path) -> None:
    torch.save(OBJ, path)
    for action in (s4weights.verify, s4weights.inspect):
        with pytest.raises(s4weights.UnsupportedFormatError, match=r"not a \.s4w file"):
            action(path)
    safetensors.torch.save_file(OBJ, path)
    with pytest.raises(s4weights.UnsupportedFormatError, match="safetensors"):
        s4weights.inspect(path)


def test_urls_of_files(tmp_path):
    state = {"w": torch.ones(3)}
    torch.save(state, tmp_path / "a b.pt")
    s4weights.save(state, tmp_path / "a b.s4w")
    for name in ("a b.pt", "a b.s4w"):
        assert_identical(s4weights.load((tmp_path / name).as_uri()), state)


def test_misspelt_arguments_for_a_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file(OBJ, path)
    with pytest.raises(TypeError, match="unexpected keyword argument 'map_loc'"):
        s4weights.load(path, map_loc="meta")
    assert s4weights.load(path, weights_only=False, encoding="latin1").keys() == OBJ.keys()
