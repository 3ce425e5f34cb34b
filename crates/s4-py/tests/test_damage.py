"""If a store's newest checkpoint is damaged, in whatever way, the one before it is loaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import s4weights
from compare import assert_identical
from s4weights import CheckpointStore


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def extend(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


def delete(file: Path) -> None:
    file.unlink()


def state_of(step: int) -> dict[str, object]:
    torch.manual_seed(step)
    weights = torch.randn(200_000)
    return {"model": {"w": weights}, "optimizer": {"m": weights * 2}, "x": range(step)}


def objects(folder: Path, id: str) -> list[Path]:
    """The files of a checkpoint."""
    return sorted(p for p in folder.rglob("*") if id in str(p) and p.is_file())


@pytest.mark.parametrize("damage", [flip, cut, halve, empty, extend, delete])
def test_fallback_passes_over_any_damage(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    with CheckpointStore(tmp_path, max_chain=1) as store:
        for step in range(2):
            store.save_checkpoint(state_of(step), step)
        newest = store.list()[-1]
    files = objects(tmp_path, newest.id)
    assert len(files) >= 2
    for file in files:
        whole = file.read_bytes()
        damage(file)
        with CheckpointStore(tmp_path, timeout=5) as store:
            arguments = {"weights_only": False}
            if damage is extend and file.name != "manifest":
                # Nothing reads what is behind the end.
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    store.load_checkpoint(fallback=True, **arguments)
                file.write_bytes(whole)
                continue
            with pytest.raises(s4weights.CorruptDataError, match=newest.id):
                store.load_checkpoint(**arguments)
            with pytest.warns(UserWarning, match="step 1 is damaged"):
                loaded = store.load_checkpoint(fallback=True, **arguments)
        assert_identical(loaded, state_of(0))
        file.write_bytes(whole)
    with CheckpointStore(tmp_path) as store:
        assert store.verify()["clean"]


@pytest.mark.parametrize("damage", [flip, halve, empty, delete])
def test_fallback_passes_over_what_needs_the_damaged(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    with CheckpointStore(tmp_path, max_hops=1, timeout=5) as store:
        store.save_checkpoint(state_of(0), 0, base=True)
        store.save_checkpoint(state_of(1), 1, base=True)
        for step in (2, 3):
            state = state_of(1)
            state["model"]["w"][:100] += step  # type: ignore[index]
            store.save_checkpoint(state, step)
        assert [entry.kind for entry in store.list()] == ["base", "base", "delta", "delta"]
        base = store.list()[1]
    for file in objects(tmp_path, base.id):
        whole = file.read_bytes()
        damage(file)
        with CheckpointStore(tmp_path, timeout=5) as store, pytest.warns(UserWarning) as warned:
            loaded = store.load_checkpoint(fallback=True, weights_only=False)
        assert [str(w.message).split(" is damaged")[0].split()[-1] for w in warned] == list("321")
        assert_identical(loaded, state_of(0))
        file.write_bytes(whole)


def test_fallback_is_not_for_other_errors(tmp_path: Path) -> None:
    """Errors that may go away pass over no checkpoint: the run would go back for no reason."""
    with CheckpointStore(tmp_path) as store:
        store.save_checkpoint(state_of(0), 0)
        store.save_checkpoint(state_of(1), 1)

        def broken(done: int, total: int) -> None:
            raise s4weights.StorageError(5, "Input/output error")

        with pytest.raises(s4weights.StorageError), warnings.catch_warnings():
            warnings.simplefilter("error")
            store.load_checkpoint(fallback=True, weights_only=False, progress=broken)
        with pytest.raises(s4weights.UnsafeLoadError), warnings.catch_warnings():
            warnings.simplefilter("error")
            store.save_checkpoint({"p": Path("x")}, 2)
            store.load_checkpoint(fallback=True)
