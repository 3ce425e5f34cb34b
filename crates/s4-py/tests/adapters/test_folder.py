"""Folders that are kept as checkpoints of a store."""

from __future__ import annotations

import collections
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import s4weights
from compare import assert_identical
from s4weights.adapters._common import step_in
from s4weights.adapters._folder import restore_folder, save_folder


class Unknown:
    pass


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_files_of_every_kind_come_back(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    (folder / "deep/er").mkdir(parents=True)
    tied = torch.randn(300, 5)
    torch.save({"a": tied, "b": tied, "c": collections.OrderedDict(x=(1, 2.5))}, folder / "s.pt")
    torch.save({"x": Unknown()}, folder / "unknown.pt")
    torch.save([torch.ones(3)], folder / "old.pt", _use_new_zipfile_serialization=False)
    save_file({"w": tied, "n": torch.zeros(0, 3)}, folder / "deep/m.safetensors", {"format": "pt"})
    s4weights.save({"t": tied}, folder / "ours.s4w")
    (folder / "deep/er/broken.safetensors").write_bytes(b"not one")
    (folder / "empty").touch()
    (folder / "text.json").write_text("{}")
    before = contents(folder)
    store = s4weights.CheckpointStore(tmp_path / "store")
    save_folder(store, folder, 1)
    assert {*store.load_checkpoint()["ours.s4w"]} == {"s4w"}
    pending = save_folder(store, folder, 2, blocking=False, metrics={"loss": 0.5})
    for path in (folder / "s.pt", folder / "deep/m.safetensors"):
        path.write_bytes(b"changed at once")
    assert pending.wait().metrics == {"loss": 0.5}
    for step in (1, 2):
        # The second time, it replaces the folder that is there.
        restore_folder(store, tmp_path / "b", step)
        after = contents(tmp_path / "b")
        assert before.keys() == after.keys()
        assert all(before[name] == after[name] for name in before if name != "s.pt")
        loaded = torch.load(tmp_path / "b/s.pt")
        assert_identical(loaded, {"a": tied, "b": tied, "c": loaded["c"]})
        assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
        assert loaded["c"] == collections.OrderedDict(x=(1, 2.5))
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


#: What leads elsewhere on Windows only.
WINDOWS = ["a\\b", "C:/x"]


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "", ".", *(WINDOWS if os.name == "nt" else [])])
def test_names_that_lead_elsewhere(name: str, tmp_path: Path) -> None:
    store = s4weights.CheckpointStore(tmp_path / "store")
    state: dict[str, Any] = {"s4weights.folder": 1, name: {"bytes": torch.ones(3).byte()}}
    store.save_checkpoint(state, 1)
    (tmp_path / "kept").mkdir()
    with pytest.raises(
        s4weights.CorruptDataError, match=r"step newest: .* is not a valid name of a file"
    ):
        restore_folder(store, tmp_path / "kept")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "store"]


def test_odd_names_and_files_come_back(tmp_path: Path) -> None:
    folder, back = tmp_path / "a", tmp_path / "b"
    (folder / "sub").mkdir(parents=True)
    names = ["s4weights.folder", "sub/s4weights.folder", *([] if os.name == "nt" else ["10:30", "a\\b"])]
    for name in [*names, "empty.s4w", "fake.s4w", "run.sh"]:
        (folder / name).write_bytes(b"" if name == "empty.s4w" else name.encode())
    w = torch.arange(300.0)
    s4weights.save({"w": w}, folder / "meta.s4w", metadata={"k": "v"})
    for name in ("two.s4w", "bad.s4w"):
        with (folder / name).open("wb") as file:
            s4weights.save([w], file)
            s4weights.save([w + 1], file)
    bad = bytearray((folder / "meta.s4w").read_bytes())
    bad[60] ^= 1
    (folder / "bad.s4w").write_bytes(bad)
    torch.save([w], folder / "long.pt")
    with (folder / "long.pt").open("ab") as file:
        file.write(b"more")
    (folder / "nothing/in").mkdir(parents=True)
    if os.name == "posix":
        (folder / "run.sh").chmod(0o755)
        (folder / "link").symlink_to(folder / "sub")
        (folder / "sub/loop").symlink_to(folder)
        (folder / "dangling").symlink_to("nowhere")
    with s4weights.CheckpointStore(tmp_path / "store") as store:
        with pytest.warns(UserWarning, match="not saved"):
            save_folder(store, folder, 1)
        restore_folder(store, back)
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if path.is_file() and name.name != "meta.s4w":
            assert (back / name).read_bytes() == path.read_bytes(), name
            assert os.access(back / name, os.X_OK) == os.access(path, os.X_OK), name
    with s4weights.open(back / "meta.s4w") as file:
        assert file.metadata() == {"k": "v"} and torch.equal(file["w"], w)
    assert (back / "nothing/in").is_dir() and not (back / "dangling").exists()
    if os.name == "posix":
        assert (back / "link/s4weights.folder").is_file()


@pytest.mark.skipif(sys.platform != "linux", reason="names need not be text there only")
def test_names_that_are_not_text_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with open(os.fsencode(tmp_path / "a") + b"/\xff", "wb"):
        pass
    with s4weights.CheckpointStore(tmp_path / "store") as store:
        with pytest.raises(ValueError, match="UTF-8"):
            save_folder(store, tmp_path / "a", 1)
        assert store.list() == []


def test_folders_of_the_first_version_are_restored(tmp_path: Path) -> None:
    state = {"s4weights.folder": 1, "d/x": {"bytes": torch.ones(3).byte()}, "m.s4w": {"s4w": [1]}}
    with s4weights.CheckpointStore(tmp_path / "store") as store:
        store.save_checkpoint(state, 1)
        restore_folder(store, tmp_path / "a")
    assert (tmp_path / "a/d/x").read_bytes() == b"\1\1\1"
    assert s4weights.load(tmp_path / "a/m.s4w") == [1]


def test_what_is_no_folder(tmp_path: Path) -> None:
    store = s4weights.CheckpointStore(tmp_path / "store")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(FileNotFoundError, match="no files to save"):
        save_folder(store, tmp_path / "nothing", 1)
    states: list[Any] = [
        {"w": torch.ones(1)},
        {"s4weights.folder": 2},
        {"s4weights.folder": {"version": 3}},
        {"s4weights.folder": {"version": 2, "folders": ["x", 1], "executable": []}},
        {"s4weights.folder": {"version": 2, "folders": ["../x"], "executable": []}},
        {"s4weights.folder": {"version": 2, "folders": [], "executable": ["y"]}},
        {"s4weights.folder": 1, "x": 5},
    ]
    for step, state in enumerate(states):
        store.save_checkpoint(state, step)
        with pytest.raises(s4weights.S4Error, match=f"step {step}"):
            restore_folder(store, tmp_path / "b", step)


def test_steps_in_names() -> None:
    names = {"checkpoint-500": 500, "a/epoch=1-step=20.ckpt": 20, "run7/step_3/": 3, "v2-12b": 12}
    assert {name: step_in(name) for name in names} == names
    with pytest.raises(ValueError, match="last"):
        step_in("5/last.ckpt")


def test_a_folder_that_a_runner_published_is_found_by_its_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made/file").write_text("text")
    with s4weights.CheckpointStore(tmp_path / "store") as store:
        entry = save_folder(store, tmp_path / "made", 1, tags={"s4w.submission": "the id"})
        (tmp_path / "made/file").write_text("other")
        save_folder(store, tmp_path / "made", 2)
    there = s4weights.CheckpointStore(tmp_path / "store", runner="unix:///nobody")

    def forgotten(method: str, path: str, message: object = None) -> dict[str, Any]:
        raise s4weights.NotFoundError(2, "runner: no such submission")

    monkeypatch.setattr(there.runner, "_request", forgotten)
    for id in ("the id", entry.id):
        restore_folder(there, tmp_path / "again", id)
        assert (tmp_path / "again/file").read_text() == "text"
