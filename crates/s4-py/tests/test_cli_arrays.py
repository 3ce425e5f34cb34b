"""`s4w decompress` and `s4w store restore` to a .safetensors file: tensors as they were saved."""

import os
from pathlib import Path
from typing import Any

import pytest
from test_cli import main, run

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import s4weights  # noqa: E402


def views() -> dict[str, Any]:
    """Tensors that are not laid out as they look."""
    memory = torch.arange(24.0)
    conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    return {
        **conv.state_dict(),
        "transposed": torch.arange(6).reshape(2, 3).t(),
        "slice": torch.arange(10)[2:5],
        "expanded": torch.ones(1).expand(5),
        "row": torch.arange(8.0).reshape(4, 2)[1],
        "q": memory[:8].view(4, 2),
        "k": memory[8:16],
        "columns": memory.reshape(4, 6)[:, 1::2],
        "bits": memory.view(torch.int32)[3:5],
        "nested": [{"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}, "a\nb": torch.ones(3)}],
        1: {0.5: torch.tensor(3, dtype=torch.int16), (1, "x"): torch.empty(0, 4)},
    }


def complex_views() -> dict[str, Any]:
    z = torch.tensor([1 + 2j, 3 - 1j])
    return {"conj": z.conj(), "imag": z.conj().imag, "part": {"t": torch.arange(6).view(2, 3).t()}}


def check(file: Path, saved: Path, missing: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """Compares a .safetensors file with what `open` reads."""
    found = load_file(file)
    with s4weights.open(saved) as f:
        assert found.keys() == set(f) - missing
        for name, tensor in found.items():
            expected = f[name]
            assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), name


@pytest.mark.parametrize("make", [views, complex_views])
def test_tensors_are_written_as_they_were_saved(tmp_path: Path, make: Any) -> None:
    saved, file, store = tmp_path / "a.s4w", tmp_path / "a.safetensors", str(tmp_path / "store")
    state = make()
    s4weights.save(state, saved, metadata={"run": "7"})
    s4weights.save_checkpoint(state, store, 1)
    out = run("decompress", str(saved), str(file))
    assert out.returncode == 0, out.stderr
    # The native program judges a tree, and PyTorch a pickle.
    assert ("with all other values" in out.stderr) == (make is complex_views), out.stderr
    check(file, saved)
    with safe_open(file, "pt") as f:
        assert f.metadata() == {"run": "7"}
    out = run("store", "restore", store, "latest", str(file), "--force")
    assert out.returncode == 0, out.stderr
    check(file, saved)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("is_pickle", [False, True])
def test_of_tensors_that_are_the_same_one_is_written(tmp_path: Path, is_pickle: bool) -> None:
    w = torch.arange(6.0).reshape(2, 3)
    state: dict[str, Any] = {"embed": w, "head": w, "t": w.t(), "again": {"t": w.t()}}
    if is_pickle:
        state["sparse"] = torch.eye(2).to_sparse()
    s4weights.save(state, tmp_path / "a.s4w")
    file = tmp_path / "a.safetensors"
    out = run("decompress", str(tmp_path / "a.s4w"), str(file))
    assert out.returncode == 0 and "2 tensors that share" in out.stderr, out.stderr
    assert ("1 sparse tensor" in out.stderr) == is_pickle
    check(file, tmp_path / "a.s4w", {"head", "again.t"})
    with safe_open(file, "pt") as f:
        assert f.metadata() == {"head": "embed", "again.t": "t"}


def test_what_safetensors_cannot_hold_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    sparse = torch.eye(2).to_sparse()
    for state in ({"z": torch.zeros(2, dtype=torch.complex32)}, {"__metadata__": torch.ones(1)}):
        for more in ({}, {"sparse": sparse}):
            s4weights.save({**state, **more}, tmp_path / "a.s4w")
            out = run("decompress", str(tmp_path / "a.s4w"), str(file))
            assert out.returncode == 4 and "safetensors" in out.stderr, out.stderr
    # Without running code.
    s4weights.save({"w": torch.ones(2), "run": Path("x"), "s": sparse}, tmp_path / "a.s4w")
    code, said = main("decompress", str(tmp_path / "a.s4w"), str(file))
    assert code == 4 and "never does" in said, said
    # More than there can be: one value, a trillion times.
    for more in ({}, {"sparse": sparse}):
        s4weights.save({"w": torch.ones(1).expand(1 << 20, 1 << 20), **more}, tmp_path / "a.s4w")
        out = run("decompress", str(tmp_path / "a.s4w"), str(file))
        assert out.returncode == 4 and "repeat what is stored" in out.stderr, out.stderr
    assert not file.exists()


def test_what_pytorch_cannot_write_is_not_damaged(tmp_path: Path) -> None:
    pairs = torch.arange(8.0)
    states: list[dict[str, Any]] = [{"a": pairs, "b": pairs.view(torch.int32)}]
    if hasattr(torch, "int4"):
        states.append({"a": torch.zeros(4, dtype=torch.uint8).view(torch.int4)})
    for state in states:
        s4weights.save(state, tmp_path / "a.s4w")
        code, said = main("decompress", str(tmp_path / "a.s4w"), str(tmp_path / "a.pt"))
        assert code == 4 and "PyTorch cannot write" in said, said
        assert not (tmp_path / "a.pt").exists()


def test_a_pt_file_is_on_disk_before_it_replaces_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s4weights.save({"w": torch.ones(2), "step": 1}, tmp_path / "a.s4w")
    target, mine = tmp_path / "a.pt", tmp_path / "mine"
    mine.write_text("mine")
    # A link of the name that the temporary file had would have led elsewhere.
    (tmp_path / f".a.pt.{os.getpid()}.tmp").symlink_to(mine)
    done: list[str] = []
    fsync, replace, link = os.fsync, Path.replace, os.link
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(Path, "replace", lambda a, b: (done.append("replace"), replace(a, b))[1])
    monkeypatch.setattr(os, "link", lambda a, b: (done.append("link"), link(a, b))[1])
    for flags, by in (([], "link"), (["--force"], "replace")):
        assert main("decompress", *flags, str(tmp_path / "a.s4w"), str(target))[0] == 0
        # The file, and then the folder with its new name.
        assert done[-3:] == ["fsync", by, "fsync"]
        assert mine.read_text() == "mine" and torch.load(target)["step"] == 1
