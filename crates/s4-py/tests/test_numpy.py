"""Files as arrays of NumPy, with and without PyTorch."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import s4weights
import s4weights.numpy
from compare import assert_identical
from test_corrupt import BAD_TREES, write_tree
from test_open import INDICES


def state() -> dict[str, Any]:
    random = np.random.default_rng(3)
    large = random.standard_normal((700, 300), np.float32)
    return {
        "model": OrderedDict(
            large=large,
            tied=large,
            turned=random.standard_normal((40, 50)).T,
            big_endian=np.arange(5, dtype=">i4"),
            scalar=np.array(2.5),
            empty=np.empty((0, 4), np.float16),
            bits=np.array([True, False]),
            complex=np.array([1 + 2j, 3], np.complex64),
        ),
        "opt": {0: [np.arange(4, dtype=np.uint16)], "betas": (0.9, 0.999)},
        "step": 3,
        "name": "run",
        "none": None,
        "bytes": b"x",
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        native = a.dtype.newbyteorder("=")
        return type(b) is np.ndarray and b.dtype == native and np.array_equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_arrays_come_back(tmp_path: Path) -> None:
    path = tmp_path / "a.s4w"
    report = s4weights.numpy.save(state(), path, preset="fast", metadata={"run": "x"})
    assert report["bytes_out"] == path.stat().st_size
    loaded = s4weights.numpy.load(path)
    assert same(state(), loaded)
    assert loaded["model"]["tied"] is loaded["model"]["large"]
    loaded["model"]["large"][:] = 0
    assert s4weights.inspect(path)["metadata"] == {"run": "x"}
    stream = io.BytesIO()
    s4weights.numpy.save(state(), stream, preset="fast", metadata={"run": "x"})
    assert stream.getvalue() == path.read_bytes()
    stream.seek(0)
    assert same(state(), s4weights.numpy.load(stream))
    part = s4weights.numpy.load(path, keys=["opt.0"])
    assert list(part) == ["opt"] and same(state()["opt"][0], part["opt"][0])


def test_the_files_are_those_of_tensors(tmp_path: Path) -> None:
    path = tmp_path / "a.s4w"
    s4weights.numpy.save(state(), path)
    loaded = s4weights.load(path)
    expected = state()["model"]
    for name, array in expected.items():
        native = array.astype(array.dtype.newbyteorder("="))
        assert torch.equal(loaded["model"][name], torch.from_numpy(native)), name
    assert loaded["step"] == 3
    base = torch.arange(24.0).reshape(4, 6)
    saved = {
        "w": torch.nn.Parameter(base),
        "row": base[1],
        "turned": base.T,
        "shape": base.shape,
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "state": torch.nn.Linear(3, 2).state_dict(),
        "nan": float("nan"),
    }
    s4weights.save(saved, path)
    arrays = s4weights.numpy.load(path)
    assert same(base.numpy(), arrays["w"]) and same(base.T.numpy(), arrays["turned"])
    arrays["w"][1] = -1
    assert (arrays["row"] == -1).all() and (arrays["turned"][:, 1] == -1).all()
    assert (arrays["shape"], arrays["dtype"], arrays["device"]) == ((4, 6), "bfloat16", "cpu")
    assert same(saved["state"]["weight"].numpy(), arrays["state"]["weight"])  # type: ignore[index]


def test_dtypes_of_ml_dtypes(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    path = tmp_path / "a.s4w"
    names = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]
    arrays = {name: np.array([0.5, 2, 4]).astype(getattr(ml_dtypes, name)) for name in names}
    s4weights.numpy.save(arrays, path)
    assert same(arrays, s4weights.numpy.load(path))
    for name, tensor in s4weights.load(path).items():
        assert tensor.dtype == getattr(torch, name)
        assert tensor.to(torch.float32).tolist() == [0.5, 2, 4]
        got = s4weights.numpy.open(path)[name]
        assert got.dtype == arrays[name].dtype and (got == arrays[name]).all()


def test_parts_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.s4w"
    s4weights.numpy.save(state(), path, metadata={"run": "x"})
    with s4weights.numpy.open(path) as f, s4weights.open(path) as tensors:
        assert list(f) == list(tensors) and "model.turned" in f
        assert f.metadata() == {"run": "x"}
        for name in f:
            expected = tensors[name].numpy()
            assert same(expected, f.get_tensor(name)), name
            part = f.get_slice(name)
            assert part.get_shape() == list(expected.shape) and part.get_dtype() == expected.dtype
            for index in [*INDICES, (slice(1, 9), slice(None, None, 7))]:
                try:
                    want = expected[index]
                except IndexError:
                    with pytest.raises(IndexError):
                        part[index]
                    continue
                assert same(np.asarray(want), part[index]), (name, index)
                assert part[index].flags.writeable
    views = torch.arange(24.0).reshape(4, 6)
    s4weights.save(
        {"w": views, "t": views.T, "row": views[2], "wide": views[:1].expand(3, 6)}, path
    )
    with s4weights.numpy.open(path) as f:
        assert same(views.T[1:4, ::2].numpy(), f.get_slice("t")[1:4, ::2])
        assert same(views[2, 3:].numpy(), f.get_slice("row")[3:])
        assert same(views[:1].expand(3, 6).numpy(), f["wide"])
    with pytest.raises(ValueError, match="closed"):
        f["w"]


def test_what_only_pytorch_can_keep_is_said(tmp_path: Path) -> None:
    path, shared = tmp_path / "a.s4w", [1]
    for obj, words in (
        ({"m": {"x": object()}}, r"`m\.x` has type object"),
        ({"m": np.array(["text"])}, "`m`: the format does not support dtype str"),
        ({"m": np.array([None])}, "`m`: the format does not support dtype object"),
        ({"m": np.zeros(2, [("a", "i4")])}, "`m`: the format does not support dtype"),
        ({"m": np.zeros(2, "M8[s]")}, "`m`: the format does not support dtype datetime64"),
        ({"m": np.ma.masked_array([1, 2], [True, False])}, "`m` has type MaskedArray"),
        ({"m": torch.ones(2)}, "`m` has type Tensor"),
        ([shared, shared], "occurs"),
    ):
        with pytest.raises(s4weights.UnsupportedFormatError, match=words):
            s4weights.numpy.save(obj, path)
    assert not path.exists()
    s4weights.save({"a": slice(1)}, path)
    for read in (s4weights.numpy.load, s4weights.numpy.open):
        with pytest.raises(s4weights.UnsupportedFormatError, match="saved as a pickle"):
            read(path)
    torch.save({"a": 1}, path)
    with pytest.raises(s4weights.UnsupportedFormatError, match=r"not a \.s4w file"):
        s4weights.numpy.load(path)
    s4weights.save({"a": torch.zeros(2, dtype=torch.uint8).view(torch.bits8)}, path)
    with pytest.raises(s4weights.UnsupportedFormatError, match="NumPy has no dtype bits8"):
        s4weights.numpy.load(path)


#: Only PyTorch can tell what is wrong with these: devices, dtypes and gradients.
FINE = (
    {"root": {"torch.dtype": "Tensor"}},
    {"root": {"torch.device": "nonsense"}},
    {"root": {"tensor": 0, "dtype": "int32", "grad": True}},
)


@pytest.mark.parametrize("tree", [t for t in BAD_TREES if t not in FINE], ids=lambda t: str(t)[:60])
def test_bad_trees(tree: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.s4w"
    write_tree(path, tree, t=torch.arange(6.0))
    for read in (s4weights.numpy.load, s4weights.numpy.open):
        with pytest.raises((s4weights.CorruptDataError, s4weights.UnsupportedFormatError)):
            read(path)


@pytest.mark.parametrize("tree", FINE, ids=str)
def test_names_that_are_not_looked_up(tree: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.s4w"
    write_tree(path, tree, t=torch.arange(6.0))
    loaded = s4weights.numpy.load(path)
    assert type(loaded) is str or loaded.dtype == np.int32


WITHOUT = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "jax", "ml_dtypes"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTorch())
import numpy as np
import s4weights
import s4weights.numpy as s4

theirs, ours = sys.argv[1:]
arrays = s4.load(theirs)
assert arrays["w"].tolist() == [[0.0, 1.0], [2.0, 3.0]] and arrays["step"] == 3, arrays
s4.save({"w": arrays["w"] + 1, "step": 4}, ours)
with s4.open(ours) as f:
    assert f.get_slice("w")[1].tolist() == [3.0, 4.0]
s4weights.verify(ours)
assert s4weights.inspect(ours)["form"] == "tree"
assert s4weights.get_unsafe_globals(theirs) == []
assert s4weights.CheckpointStore(ours + ".store").list() == []
for use in (lambda: s4weights.load(ours), lambda: s4weights.save({}, ours), lambda: s4weights.open(ours)):
    try:
        use()
    except ModuleNotFoundError as error:
        assert "s4weights.numpy" in str(error), error
    else:
        raise SystemExit("PyTorch was there")
assert "torch" not in sys.modules
"""


def test_without_pytorch(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs.s4w", tmp_path / "ours.s4w"
    s4weights.save({"w": torch.arange(4.0).reshape(2, 2), "step": 3}, theirs)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    subprocess.run([sys.executable, "-c", WITHOUT, theirs, ours], check=True, env=environment)
    expected = {"w": torch.tensor([[1.0, 2], [3, 4]]), "step": 4}
    assert_identical(s4weights.load(ours), expected)


def test_an_ellipsis_for_no_dimension_arranges_as_numpy_does(tmp_path: Path) -> None:
    path, array = tmp_path / "a.s4w", np.arange(120).reshape(2, 3, 4, 5)
    turned = torch.arange(120).reshape(5, 4, 3, 2).permute(3, 2, 1, 0)
    s4weights.save({"a": torch.from_numpy(array), "t": turned}, path)
    every = slice(None)
    for index in (
        (every, [0, 1], 2, ..., 0),
        (every, [0, 1], ..., 2, 0),
        (every, [0, 1], ..., [1, 2], every),
        (every, [0, 1], 2, 0, ...),
        (every, [0, 1], 2, 0),
        (..., every, [0, 1], 2, 0),
        (every, [0, 1], 2, ...),
        (1, 2, 3, ..., 4),
    ):
        with s4weights.numpy.open(path) as f, s4weights.open(path) as tensors:
            assert same(np.asarray(array[index]), f.get_slice("a")[index]), index
            assert same(np.asarray(turned.numpy()[index]), f.get_slice("t")[index]), index
            assert torch.equal(torch.from_numpy(array)[index], tensors.get_slice("a")[index])


def test_a_dimension_of_one_may_have_any_stride(tmp_path: Path) -> None:
    path = tmp_path / "a.s4w"
    write_tree(
        path,
        {"root": {"dict": [["a", {"tensor": 0, "shape": [1, 6], "stride": [1 << 62, 1]}]]}},
        t=torch.arange(6.0),
    )
    expected = np.arange(6, dtype=np.float32).reshape(1, 6)
    assert same(expected, s4weights.numpy.open(path)["a"])
    assert same(expected, s4weights.numpy.load(path)["a"])
    assert same(expected, s4weights.open(path)["a"].numpy())


def test_sets_of_tensors_are_not_damage(path: Path) -> None:
    for kind in (set, frozenset):
        for obj in (kind([torch.ones(2)]), kind([(1, torch.ones(2))])):
            s4weights.save({"s": obj}, path)
            with pytest.raises(s4weights.UnsupportedFormatError, match="a set of tensors"):
                s4weights.numpy.load(path)
    s4weights.save({"s": {1, (2, "x")}}, path)
    assert s4weights.numpy.load(path) == {"s": {1, (2, "x")}}
