"""`open`: tensors one by one, and in part; `load(keys=...)`."""

import collections
import threading

import numpy as np
import pytest
import torch

import s4weights
import s4weights.numpy
from compare import assert_identical


def state():
    torch.manual_seed(3)
    base = torch.randn(400, 500)
    return {
        "model": collections.OrderedDict(
            w=torch.randn(700, 300),
            h=torch.randn(40, 50, 60).to(torch.bfloat16),
            tied=base,
            row=base[7],
            t=base.t(),
            bias=torch.arange(10),
            scalar=torch.tensor(2.5),
            empty=torch.empty(0, 4),
            z=torch.randn(30, 5, dtype=torch.complex64).conj(),
        ),
        "step": 3,
    }


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.s4w"
    s4weights.save(state(), path, metadata={"run": "x"})
    return path


def test_whole_tensors_by_their_key_paths(path):
    expected = state()["model"]
    with s4weights.open(path) as f:
        assert list(f) == [f"model.{name}" for name in expected]
        assert list(f.keys()) == list(f)
        assert len(f) == len(expected)
        assert f.metadata() == {"run": "x"}
        for name, tensor in expected.items():
            got = f.get_tensor(f"model.{name}")
            assert torch.equal(got, tensor), name
            assert got.dtype == tensor.dtype
            assert torch.equal(f[f"model.{name}"], tensor)
            assert f.get_slice(f"model.{name}").get_shape() == list(tensor.shape)
            assert f.get_slice(f"model.{name}").get_dtype() == tensor.dtype


INDICES = [
    ...,
    5,
    -1,
    slice(3, 9),
    slice(None, None, 3),
    slice(30, 5),
    (slice(10, 20), slice(2, 4)),
    (slice(1, 30, 7), 2),
    (..., 3),
    (0, ...),
    (slice(-8, -2), ..., slice(-3, None)),
    None,
    (None, 1, None),
    [0, 2],
    [5, -1, 3, 5],
    [],
    range(1, 6, 2),
    ([0, 2], slice(1, 4)),
    (slice(1, 9, 2), [3, 0]),
    ([0, 1], [2, 3]),
    (..., [1, 0], None),
]


@pytest.mark.parametrize("name", ["w", "h", "tied", "row", "t", "z"])
def test_parts_are_those_of_the_tensor(path, name):
    tensor = state()["model"][name]
    with s4weights.open(path) as f:
        part = f.get_slice(f"model.{name}")
        for index in INDICES:
            try:
                expected = tensor[index]
            except IndexError:
                with pytest.raises(IndexError):
                    part[index]
                continue
            got = part[index]
            assert got.shape == expected.shape, index
            assert torch.equal(got, expected), index


@pytest.mark.parametrize(
    ("index", "error"),
    [
        (700, IndexError),
        (-701, IndexError),
        ((0, 0, 0), IndexError),
        ((..., ...), IndexError),
        (slice(None, None, -1), ValueError),
        ("x", TypeError),
        (True, TypeError),
        ([True, False], TypeError),
        (torch.tensor([True, False]), TypeError),
        ([0, 700], IndexError),
        ([[0, 1]], TypeError),
        (torch.tensor([[0, 1]]), TypeError),
        ([0.5], TypeError),
        (1.0, TypeError),
    ],
)
def test_other_indices_are_refused(path, index, error):
    with s4weights.open(path) as f, pytest.raises(error):
        f.get_slice("model.w")[index]


def test_arrays_of_indices(path):
    tensor = state()["model"]["w"]
    with s4weights.open(path) as f:
        for numbers in (torch.tensor([4, 1]), np.array([4, 1]), torch.tensor(3), np.int64(3)):
            assert torch.equal(f.get_slice("model.w")[numbers], tensor[numbers])


def test_what_is_not_there_and_what_was_closed(path, tmp_path):
    with s4weights.open(path) as f:
        with pytest.raises(KeyError, match=r"did you mean 'model\.bias'"):
            f.get_tensor("model.bais")
        with pytest.raises(KeyError, match="no tensor is at 'xyz'"):
            f.get_tensor("xyz")
        assert repr(f) == f"<s4weights.File {str(path)!r}: {len(f)} tensors>"
        part = f.get_slice("model.w")
        assert repr(part) == "<s4weights.Slice 'model.w': torch.float32 [700, 300]>"
        with pytest.raises(KeyError):
            f.get_slice("step")
    with pytest.raises(ValueError, match="closed"):
        f.get_tensor("model.w")
    assert repr(f).endswith(": closed>")
    torch.save({}, tmp_path / "torch")
    with pytest.raises(s4weights.UnsupportedFormatError):
        s4weights.open(tmp_path / "torch")
    with pytest.raises(s4weights.NotFoundError):
        s4weights.open(tmp_path / "nothing")


def test_a_part_decodes_its_chunks_only(path):
    data = bytearray(path.read_bytes())
    # The first chunk of the file is damaged: parts in other chunks can still be read.
    whole = s4weights.load(path)["model"]["w"]
    at = 16 + 100
    data[at] ^= 0xFF
    broken = path.with_name("broken")
    broken.write_bytes(data)
    with s4weights.open(broken) as f:
        with pytest.raises(s4weights.CorruptDataError):
            f.get_slice("model.w")[0]
        assert torch.equal(f.get_slice("model.w")[690:], whole[690:])


def test_threads_read_one_file(path):
    expected = state()["model"]["w"]
    wrong = []
    with s4weights.open(path) as f:

        def read(start):
            for i in range(start, 700, 97):
                if not torch.equal(f.get_slice("model.w")[i : i + 40], expected[i : i + 40]):
                    wrong.append(i)

        threads = [threading.Thread(target=read, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_a_pickled_object_is_opened_too(tmp_path):
    model = torch.nn.Linear(300, 400)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(300)).sum().backward()
    optimizer.step()
    path = tmp_path / "a"
    s4weights.save({"o": optimizer.state_dict(), "d": collections.deque([model.weight])}, path)
    with s4weights.open(path, weights_only=False) as f:
        moments = [key for key in f if key.endswith("exp_avg")]
        assert len(moments) == 2
        saved = optimizer.state_dict()["state"][0]["exp_avg"]
        assert torch.equal(f.get_slice(moments[0])[3:9], saved[3:9])


def test_load_takes_keys(path):
    model = {"w": torch.randn(700, 300), "b": torch.ones(3)}
    s4weights.save({"model": model, "step": 3}, path)
    got = s4weights.load(path, keys=["model.w", "step"])
    assert_identical(got, {"model": {"w": model["w"]}, "step": 3})
    with pytest.raises(KeyError, match=r"model\.x"):
        s4weights.load(path, keys=["model.x"])
    torch.save(model, path)
    with pytest.raises(s4weights.UnsupportedFormatError):
        s4weights.load(path, keys=["w"])


def test_two_tensors_of_one_key_path(tmp_path):
    both = {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}
    s4weights.save(both, tmp_path / "x.s4w")
    with s4weights.open(tmp_path / "x.s4w") as f:
        assert list(f) == ["a.b", "a.b~2"]
        assert torch.equal(f["a.b"], torch.ones(2)) and torch.equal(f["a.b~2"], torch.zeros(2))
    assert list(s4weights.numpy.open(tmp_path / "x.s4w")) == ["a.b", "a.b~2"]
    # If the keys were in another order, nothing would tell which is which.
    with pytest.raises(s4weights.MismatchError, match=r"`a.b` is the key path of two tensors"):
        s4weights.load_into(both, tmp_path / "x.s4w")


def test_what_load_into_passes_over(tmp_path):
    class Extra(torch.nn.Linear):
        def get_extra_state(self):
            return {"t": torch.ones(2)}

        def set_extra_state(self, state):
            pass

    module = Extra(2, 3)
    s4weights.save(module.state_dict(), tmp_path / "m.s4w")
    # No error although it is strict: loading extra state is left to the module.
    assert s4weights.load_into(module, tmp_path / "m.s4w") == ([], ["_extra_state.t"])
    nested = torch.nn.Sequential(module)
    missing, unexpected = s4weights.load_into(nested, tmp_path / "m.s4w", strict=False)
    assert missing == ["0.weight", "0.bias"]
    assert unexpected == ["weight", "bias", "_extra_state.t"]


def test_tensors_behind_very_many_containers(tmp_path):
    state = {"vocabulary": [(i,) for i in range((1 << 20) + 10)], "w": torch.ones(3)}
    s4weights.save(state, tmp_path / "x.s4w")
    state["w"].zero_()
    s4weights.load_into(state, tmp_path / "x.s4w")
    assert torch.equal(state["w"], torch.ones(3))
