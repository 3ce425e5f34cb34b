"""Damaged and hostile files are refused: they cause no crash, run no code, read no other data."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from s4weights import _core
from s4weights._select import select
from test_map_location import write_tree

OBJ = {
    "weight": torch.linspace(-1, 1, 70_000).bfloat16(),
    "small": [torch.ones(3), torch.arange(5)],
    "shared": None,
}
OBJ["shared"] = OBJ["small"]


def test_every_cut_is_found(path: Path) -> None:
    s4weights.save(OBJ, path)
    data = path.read_bytes()
    for length in {*range(9, 100, 7), *range(100, len(data), len(data) // 40), len(data) - 1}:
        path.write_bytes(data[:length])
        with pytest.raises(s4weights.CorruptDataError):
            s4weights.load(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(s4weights.CorruptDataError):
        s4weights.load(path)


def test_every_flip_is_found(path: Path) -> None:
    s4weights.save(OBJ, path)
    data = path.read_bytes()
    choose = random.Random(1)
    places = {*range(8, 16), *range(len(data) - 64, len(data))}
    places |= set(choose.sample(range(len(data)), 200))
    for place in sorted(places - set(range(8))):
        damaged = bytearray(data)
        damaged[place] ^= 1 << choose.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises((s4weights.CorruptDataError, s4weights.UnsupportedFormatError)):
            # Gaps between chunks are covered only by the hash of the whole file.
            s4weights.load(path)
            s4weights.verify(path)


def test_the_place_of_the_damage_is_named(path: Path) -> None:
    s4weights.save({"model": {"weight": torch.rand(300_000)}}, path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    for action in (s4weights.load, s4weights.verify):
        with pytest.raises(s4weights.CorruptDataError, match=r"model\.weight.*chunk"):
            action(path)
    assert s4weights.load(path, map_location="meta")["model"]["weight"].shape == (300_000,)


def test_another_version_is_refused_by_name(path: Path) -> None:
    s4weights.save(OBJ, path)
    data = bytearray(path.read_bytes())
    data[10] = 77
    path.write_bytes(data)
    with pytest.raises(s4weights.UnsupportedFormatError, match=r"0\.77"):
        s4weights.load(path)


BAD_TREES: list[Any] = [
    "[]",
    "{}",
    {"root": {"tensor": 1}},
    {"root": {"tensor": -1}},
    {"root": {"tensor": "0"}},
    {"root": {"tensor": 0.0}},
    {"root": {"tensor": True}},
    {"root": {"tensor": 0, "shape": [7]}},
    {"root": {"tensor": 0, "shape": [2], "offset": 5}},
    {"root": {"tensor": 0, "offset": -1}},
    {"root": {"tensor": 0, "shape": [2], "stride": [-1]}},
    {"root": {"tensor": 0, "shape": [2], "stride": [6]}},
    {"root": {"tensor": 0, "shape": [2, 1], "stride": [1]}},
    {"root": {"tensor": 0, "shape": [1 << 62, 1 << 62], "stride": [0, 0]}},
    {"root": {"tensor": 0, "shape": [1 << 70], "stride": [0]}},
    {"root": {"tensor": 0, "dtype": "float64"}},
    {"root": {"tensor": 0, "dtype": "save"}},
    {"root": {"tensor": 0, "dtype": "__name__"}},
    {"root": {"tensor": 0, "dtype": 3}},
    {"root": {"tensor": 0, "dtype": "int32", "grad": True}},
    {"root": {"same": 0}},
    {"root": {"list": []}},
    {"root": {}},
    {"root": {"dict": [[[], 1]]}},
    {"root": {"dict": [["a"]]}},
    {"root": {"dict": {"a": 1}}},
    {"root": {"set": [[]]}},
    {"root": {"int": "zz"}},
    {"root": {"int": 3}},
    {"root": {"float": "00"}},
    {"root": {"complex": [1.0]}},
    {"root": {"complex": ["a", "b"]}},
    {"root": {"complex": [{"tensor": 0, "shape": []}, 0.0]}},
    {"root": {"complex": [0.0, {"tensor": 0, "shape": [1]}]}},
    {"root": {"complex": [True, 0.0]}},
    {"root": {"complex": [0.0, {"complex": [0.0, 1.0]}]}},
    '{"root": {"complex": [1' + "0" * 400 + ", 0.0]}}",
    {"root": {"bytes": "not base64!"}},
    {"root": {"bytes": 3}},
    {"root": {"torch.Size": [-1]}},
    {"root": {"torch.dtype": "Tensor"}},
    {"root": {"torch.device": "nonsense"}},
    {"root": {"odict": [], "attrs": {"dict": [[1, 2]]}}},
    {"root": {"odict": [], "attrs": 3}},
    {"root": {"dict": [], "odict": []}},
    {"root": {"tensor": 0, "int": "0x1"}},
    {"root": {"tensor": 0, "attrs": {"dict": []}}},
    {"root": {"dict": [], "more": 1}},
    {"root": {"attrs": {"dict": []}}},
    {"root": 1, "more": 2},
    '{"root": {"tensor": 0, "tensor": 0}}',
    '{"root": 1, "root": 2}',
    '{"root": [{"int": "0x1", "\\u0069nt": "0x2"}]}',
    '{"root": "\\ud800"}',
    '{"root": {"dict": [["\\udfff", 1]]}}',
    '{"root": ' + "[" * 100_000 + "]" * 100_000 + "}",
    '{"root": 1' + "0" * 5000 + "}",
]


@pytest.mark.parametrize("tree", BAD_TREES, ids=lambda t: str(t)[:60])
def test_bad_trees(tree: Any, path: Path) -> None:
    write_tree(path, tree, t=torch.arange(6.0))
    with pytest.raises(s4weights.CorruptDataError):
        s4weights.load(path)


@pytest.mark.parametrize("bad", [{"dict": [], "set": []}, {"list": []}, {"int": "0x1", "more": 1}])
def test_bad_trees_are_refused_where_they_are_not_wanted(bad: Any) -> None:
    tree: Any = {"root": {"dict": [["a", 1], ["b", [bad]]]}}
    with pytest.raises(s4weights.CorruptDataError):
        select(json.dumps(tree), ["a"])
    tree["root"]["dict"].pop()
    assert select(json.dumps(tree), ["a"]) == (json.dumps(tree), frozenset())


def test_trees_that_are_no_json(path: Path) -> None:
    for text in ("{", "", '{"root": NaN}'):
        with pytest.raises(ValueError):
            write_tree(path, text)
    assert not path.exists()


def test_files_of_tensors_alone(path: Path) -> None:
    writer = _core.Writer(str(path), None, None, "fast", None, {})
    tensor = torch.arange(6.0)
    writer.write(
        [("a", "float32", (2, 3), tensor.data_ptr(), 24), ("b", "bytes", (0,), 0, 0)], b"", None
    )
    writer.finish(None, {}, {})
    loaded = s4weights.load(path)
    assert loaded["a"].tolist() == [[0, 1, 2], [3, 4, 5]] and loaded["b"].dtype == torch.uint8


def test_persistent_ids_that_lie(path: Path) -> None:
    import io
    import pickle

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return obj.id if isinstance(obj, Lie) else None

    class Lie:
        def __init__(self, *fields: Any) -> None:
            self.id = fields

    float_storage = torch.FloatStorage
    for lie in (
        ("storage", float_storage, "1", "cpu", 6),
        ("storage", float_storage, "-1", "cpu", 6),
        ("storage", float_storage, "x", "cpu", 6),
        ("storage", float_storage, "0", "cpu", 7),
        ("storage", float_storage, "0", "cpu", 5),
        ("storage", float_storage, "0", "cpu", 1 << 60),
        ("storage", float_storage, "0", "cpu", -6),
        ("storage", "FloatStorage", "0", "cpu", 6),
        ("storage", float_storage, "0", "cpu"),
        ("module", float_storage, "0", "cpu", 6),
    ):
        stream = io.BytesIO()
        Pickler(stream, 2).dump(Lie(*lie))
        writer = _core.Writer(str(path), None, None, "fast", None, {})
        tensor = torch.arange(6.0)
        writer.write([("t", "float32", (6,), tensor.data_ptr(), 24)], b"", None)
        writer.finish(None, {"pickle": stream.getvalue()}, {})
        for weights_only in (True, False):
            with pytest.raises((s4weights.CorruptDataError, s4weights.UnsafeLoadError)):
                s4weights.load(path, weights_only=weights_only)


def test_views_outside_of_their_storage(path: Path) -> None:
    tensor = torch.arange(6.0)
    s4weights.save({"view": tensor[4:6], "other": range(1)}, path)
    with torch.serialization.safe_globals([range]):
        s4weights.load(path)
        stream = bytearray(_core.Reader(str(path), None, None, None, {}).blob("pickle"))
        at = stream.index(b"K\x04K\x02")  # offset 4, size 2
        stream[at + 1] = 5
        writer = _core.Writer(str(path), None, None, "fast", None, {})
        writer.write([("t", "float32", (6,), tensor.data_ptr(), 24)], b"", None)
        writer.finish(None, {"pickle": bytes(stream)}, {})
        with pytest.raises(s4weights.CorruptDataError, match="extends beyond its 24 bytes"):
            s4weights.load(path)


def test_the_native_module_checks_what_it_is_given(path: Path) -> None:
    tensor = torch.arange(6.0)
    address = tensor.data_ptr()
    for bad in (
        ("", "float32", (6,), address, 24),
        ("t", "float33", (6,), address, 24),
        ("t", "float32", (7,), address, 24),
        ("t", "float32", (6,), 0, 24),
    ):
        writer = _core.Writer(str(path), None, None, "fast", None, {})
        with pytest.raises(ValueError):
            writer.write([bad], b"", None)
        writer.abort()
    writer = _core.Writer(str(path), None, None, "fast", None, {})
    writer.write([("t", "float32", (6,), address, 24)], b"", None)
    with pytest.raises(ValueError, match="already in use"):
        writer.write([("t", "float32", (6,), address, 24)], b"", None)
    with pytest.raises(RuntimeError, match="failed"):
        writer.finish(None, {}, {})
    assert not path.exists() and list(path.parent.iterdir()) == []
    s4weights.save({"t": tensor, "u": tensor.clone()}, path)
    reader = _core.Reader(str(path), None, None, None, {})
    out = torch.empty(12)
    for requests in (
        [(0, out.data_ptr(), 20)],
        [(2, out.data_ptr(), 24)],
        [(0, 0, 24)],
        [(0, out.data_ptr(), 24), (1, out.data_ptr() + 23, 24)],
    ):
        with pytest.raises(ValueError):
            reader.read_into(requests, None)
    reader.read_into([(1, out.data_ptr() + 24, 24), (0, out.data_ptr(), 24)], None)
    assert out.tolist() == [0, 1, 2, 3, 4, 5] * 2
    with pytest.raises(KeyError):
        reader.blob("none")
    with pytest.raises(ValueError):
        _core.Reader(None, None, None, None, {})
