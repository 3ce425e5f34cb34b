"""`map_location` of every kind, and loads that need no data."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from compare import assert_identical, through_torch
from s4weights import _core
from s4weights._storages import StorageReader


def write_tree(path: Path, tree: Any, **tensors: torch.Tensor) -> None:
    """Writes a file with a tree that was made by hand."""
    writer = _core.Writer(str(path), None, None, "fast", None, {})
    sources = [
        (name, str(t.dtype)[6:], tuple(t.shape), t.data_ptr(), t.untyped_storage().nbytes())
        for name, t in tensors.items()
    ]
    writer.write(sources, b"", None)
    text = tree if isinstance(tree, str) else json.dumps(tree)
    writer.finish(text, {}, {})


@pytest.fixture(params=["tree", "pickle"])
def gpu_file(request: pytest.FixtureRequest, path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of tensors that were on the second GPU, two of them in one storage."""
    a, b = torch.arange(6.0).reshape(2, 3), torch.ones(2)
    if request.param == "tree":
        tensor = {"tensor": 0, "device": "cuda:1"}
        view = {"tensor": 0, "device": "cuda:1", "shape": [3], "offset": 3}
        write_tree(
            path, {"root": {"dict": [["a", tensor], ["v", view], ["b", {"tensor": 1}]]}}, a=a, b=b
        )
    else:
        tags = {a.untyped_storage()._cdata: "cuda:1"}
        monkeypatch.setattr(
            torch.serialization, "location_tag", lambda s: tags.get(s._cdata, "cpu")
        )
        shared = [1]  # makes it a pickle
        s4weights.save({"a": a, "v": a[1], "b": b, "x": shared, "y": shared}, path)
        monkeypatch.undo()
    return path


def check(loaded: Any) -> None:
    assert loaded["a"].tolist() == [[0, 1, 2], [3, 4, 5]] and loaded["b"].tolist() == [1, 1]
    assert loaded["v"].untyped_storage()._cdata == loaded["a"].untyped_storage()._cdata


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_map_location_a_missing_device_is_an_error(gpu_file: Path) -> None:
    with pytest.raises(RuntimeError, match="deserialize object on a CUDA device"):
        s4weights.load(gpu_file)


@pytest.mark.parametrize(
    "where", ["cpu", torch.device("cpu"), {"cuda:1": "cpu"}, {"cuda:1": "cpu", "cpu": "cpu"}]
)
def test_device_or_dict(where: Any, gpu_file: Path) -> None:
    check(s4weights.load(gpu_file, where))


def test_callable(gpu_file: Path) -> None:
    calls: list[tuple[type, str]] = []

    def keep(storage: torch.UntypedStorage, tag: str) -> torch.UntypedStorage:
        calls.append((type(storage), tag))
        return storage

    check(s4weights.load(gpu_file, map_location=keep))
    assert calls == [(torch.UntypedStorage, "cuda:1"), (torch.UntypedStorage, "cpu")]


def test_callable_that_leaves_it_to_the_default(path: Path) -> None:
    s4weights.save([torch.ones(2)], path)
    assert_identical([torch.ones(2)], s4weights.load(path, map_location=lambda storage, tag: None))


@pytest.mark.parametrize("where", ["meta", torch.device("meta")])
def test_meta_reads_no_data(where: Any, gpu_file: Path) -> None:
    reported: list[int] = []
    loaded = s4weights.load(gpu_file, where, progress=lambda done, total: reported.append(done))
    assert {t.device.type for t in (loaded["a"], loaded["v"], loaded["b"])} == {"meta"}
    assert loaded["a"].shape == (2, 3) and loaded["v"].storage_offset() == 3
    assert loaded["a"].untyped_storage().nbytes() == 24


def test_meta_as_torch_does(path: Path) -> None:
    obj = {"a": torch.ones(3), "x": range(2), "p": torch.nn.Parameter(torch.ones(1))}
    s4weights.save(obj, path)
    loaded = s4weights.load(path, "meta", weights_only=False)
    assert_identical(through_torch(obj, map_location="meta"), loaded)


def test_fake_tensors(path: Path) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    obj = {"a": torch.ones(3, 2), "view": torch.arange(6.0)[2:]}
    for saved in (obj, {**obj, "pickled": range(2)}):
        s4weights.save(saved, path)
        with FakeTensorMode():
            loaded = s4weights.load(path, weights_only=False)
            moved = s4weights.load(path, {"cpu": "cuda:1"}, weights_only=False)
            named = s4weights.load(path, "cuda:0", weights_only=False)
        assert type(loaded["a"]) is FakeTensor and loaded["a"].shape == (3, 2)
        # Fake tensors report the device that they would be on.
        for name in obj:
            assert loaded[name].device == torch.device("cpu")
            assert moved[name].device == torch.device("cuda:1")
            assert named[name].device == torch.device("cuda:0")


def test_skip_data(path: Path) -> None:
    s4weights.save({"a": torch.ones(3, 2)}, path)
    with torch.serialization.skip_data():
        assert s4weights.load(path)["a"].shape == (3, 2)
        with pytest.raises(s4weights.UnsupportedFormatError, match="skip_data"):
            s4weights.save({"a": torch.ones(3, 2)}, path)


def test_bad_locations(path: Path) -> None:
    s4weights.save([torch.ones(2)], path)
    with pytest.raises(RuntimeError):
        s4weights.load(path, map_location="nonsense")


def test_what_a_function_of_the_caller_raises_is_its_own(tmp_path):
    state = {"w": torch.ones(3)}

    def fails(storage, location):
        return {"cuda:0": storage}[location]

    s4weights.save(state, tmp_path / "x.s4w")
    with pytest.raises(KeyError, match="cpu"):
        s4weights.load(tmp_path / "x.s4w", map_location=fails)
    with pytest.raises(TypeError, match="map_location=3"):
        s4weights.load(tmp_path / "x.s4w", map_location=3)
    with s4weights.CheckpointStore(tmp_path / "store") as store:
        store.save_checkpoint(state, 1)
        store.save_checkpoint(state, 2)
        with pytest.raises(KeyError, match="cpu"):
            store.load_checkpoint(map_location=fails, fallback=True)


def test_what_is_wrong_in_a_dict_is_the_callers(path):
    shared = [1]
    for obj in ({"w": torch.ones(3)}, {"w": torch.ones(3), "a": shared, "b": shared}):
        where = {"cpu": torch.device("cpu")}
        s4weights.save(obj, path)
        with pytest.raises(Exception) as expected:
            through_torch(obj, map_location=where)
        with pytest.raises(type(expected.value)) as raised:
            s4weights.load(path, where)
        assert not isinstance(raised.value, s4weights.S4Error)


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize(
    "where", [{"cpu": "cpu"}, lambda storage, location: storage], ids=["dict", "function"]
)
def test_nothing_keeps_what_was_loaded(where: Any, pickled: bool, path: Path) -> None:
    shared = [1]
    more = {"x": shared, "y": shared} if pickled else {}  # makes it a pickle
    s4weights.save({"a": torch.ones(5), **more}, path)
    gc.collect()
    gc.disable()
    try:
        assert s4weights.load(path, where)["a"].eq(1).all()
        assert not [obj for obj in gc.get_objects() if type(obj) is StorageReader]
    finally:
        gc.enable()
