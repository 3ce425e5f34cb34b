"""Wrong arguments, closed objects and odd places, as users come across them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from s4weights import CheckpointStore, Retention
from s4weights.adapters import _folder
from s4weights.sync import Publisher, Subscriber


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    made = CheckpointStore(tmp_path / "store")
    for step in range(2):
        made.save_checkpoint({"w": torch.full((100,), float(step))}, step)
    return made


def test_a_closed_publisher_publishes_nothing(tmp_path: Path) -> None:
    given = CheckpointStore(tmp_path / "given", max_chain=4, max_hops=3)
    for place in (tmp_path / "own", "memory:", given):
        publisher = Publisher(place)
        publisher.close()
        with pytest.raises(ValueError, match="the publisher is closed"):
            publisher.publish_delta({"w": torch.ones(3)}, 1)
        publisher.close()
    # The store that was given is still open.
    assert given.list() == [] and not (tmp_path / "own").exists()


def test_a_subscriber_is_told_what_is_wrong(tmp_path: Path) -> None:
    with Publisher(tmp_path / "a") as publisher:
        publisher.publish_delta({"w": torch.ones(3)}, 1)
    wrong: Any = b"x"
    with pytest.raises(TypeError, match="expected a folder, a URL or the address"):
        Subscriber(wrong, {"w": torch.zeros(3)})
    with Subscriber(tmp_path / "a", {"w": torch.zeros(3)}) as subscriber:
        for step in (True, "x", 1.0, -1):
            with pytest.raises(ValueError, match="step: expected a non-negative integer"):
                subscriber.apply_delta(step)  # type: ignore[arg-type]
        assert subscriber.apply_delta(1) is not None


def test_files_are_compared_by_identity(tmp_path: Path) -> None:
    s4weights.save({"w": torch.arange(3)}, tmp_path / "a.s4w")
    with s4weights.open(tmp_path / "a.s4w") as file, s4weights.open(tmp_path / "a.s4w") as other:
        assert file == file and file != other and len({file, other}) == 2
    numpy = pytest.importorskip("s4weights.numpy")
    with numpy.open(tmp_path / "a.s4w") as file:
        assert file == file and file in {file}


def test_no_checkpoint_is_chosen_by_none(store: CheckpointStore) -> None:
    wrong: Any = None
    for call in (store.pin, store.unpin, store.rebase, store.delete):
        with pytest.raises(ValueError, match="expected an integer or the id of an entry, not None"):
            call(wrong)
    assert not any(entry.pinned for entry in store.list())


def test_arguments_of_the_wrong_type_are_named(store: CheckpointStore, tmp_path: Path) -> None:
    wrong: Any
    for wrong in (Path("/run/s4w.sock"), 5):
        with pytest.raises(TypeError, match=r"runner=.*: expected an address such as unix:///path"):
            CheckpointStore(tmp_path, runner=wrong)
    wrong = (("loss", None, "min"),)
    with pytest.raises(TypeError, match=r"best=.*: expected a number of checkpoints"):
        Retention(best=wrong)
    wrong = 5
    with pytest.raises(TypeError, match="keys=5: expected a list of key paths"):
        store.load_checkpoint(keys=wrong)
    s4weights.save({"w": torch.ones(3)}, tmp_path / "a.s4w")
    wrong = "no"
    with pytest.raises(TypeError, match="strict='no': expected True or False"):
        s4weights.load_into({}, tmp_path / "a.s4w", strict=wrong)


def test_a_restored_folder_replaces_nothing_but_that_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("safetensors")
    source, place = tmp_path / "source", tmp_path / "place"
    for folder in (source, place / "mine"):
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text(folder.name)
    monkeypatch.chdir(place)
    with CheckpointStore(tmp_path / "store") as store:
        _folder.save_folder(store, source, 1)
        for wrong in (place / "mine" / "..", ".", "", ".."):
            with pytest.raises(ValueError, match=r"ends with the folder's name|the store is in this folder"):
                _folder.restore_folder(store, wrong)
        with pytest.raises(NotADirectoryError):
            _folder.restore_folder(store, place / "mine" / "a.txt")
        assert (place / "mine" / "a.txt").read_text() == "mine"
        # Without the new folder, the old one stays.
        rename = Path.rename

        def fails(self: Path, target: Any) -> Any:
            if Path(target) == place / "mine" and not self.name.endswith(".old"):
                raise PermissionError("a test")
            return rename(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", fails)
            with pytest.raises(PermissionError, match="a test"):
                _folder.restore_folder(store, place / "mine")
        assert (place / "mine" / "a.txt").read_text() == "mine"
        # Nor does an interrupt lose it, whenever it comes.
        for at in (".old", "mine"):

            def interrupted(self: Path, target: Any, at: str = at) -> Any:
                made = rename(self, target)
                if Path(target).name.endswith(at):
                    raise KeyboardInterrupt
                return made

            with monkeypatch.context() as patch:
                patch.setattr(Path, "rename", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    _folder.restore_folder(store, place / "mine")
            assert [path.name for path in place.iterdir()] == ["mine"]
            assert (place / "mine" / "a.txt").read_text() == ("mine" if at == ".old" else "source")
        # Nor is the store replaced by what it holds.
        for holds in (tmp_path, tmp_path / "store"):
            with pytest.raises(ValueError, match="the store is in this folder"):
                _folder.restore_folder(store, holds)
        # A link to a folder that it is in: all of that would be replaced, the link included.
        within = place / "within"
        within.mkdir()
        for name, to in (("up", ".."), ("here", ".")):
            (within / name).symlink_to(to)
            with pytest.raises(ValueError, match="a link to a folder that it is in"):
                _folder.restore_folder(store, within / name)
            (within / name).unlink()
        within.rmdir()
        (place / "link").symlink_to("mine")
        _folder.restore_folder(store, "link")
    assert (place / "link").is_symlink() and (place / "mine" / "a.txt").read_text() == "source"
    assert sorted(path.name for path in place.iterdir()) == ["link", "mine"]
