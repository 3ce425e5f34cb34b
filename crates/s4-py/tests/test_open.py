"""`open`: tensors one by one, and in part; `load(keys=...)`."""

import collections
import io
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
    ([0, 1], ..., [2, 3]),
    (..., [0, 1], [2, 3]),
    ([0, 1], [2, 3], ...),
    (slice(None), [0, 1], ..., 2),
    (slice(None), [0, 1], ..., [2, 0]),
    ([0, 1], slice(None), ..., 2),
    (slice(None), 3, ..., 2),
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
        (torch.tensor([[3]]), TypeError),
        (np.array([3]).reshape(1, 1), TypeError),
        (torch.tensor([1, 0], dtype=torch.uint8), TypeError),
        (torch.tensor(1, dtype=torch.uint8), TypeError),
        (torch.tensor([]), TypeError),
        (np.array([]), TypeError),
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
        empty = torch.tensor([], dtype=torch.int32)
        one = (torch.tensor(3), np.int64(3), np.array(3, np.int16))
        for numbers in (torch.tensor([4, 1]), np.array([4, 1]), empty, *one):
            assert torch.equal(f.get_slice("model.w")[numbers], tensor[numbers])


def test_what_is_not_there_and_what_was_closed(path, tmp_path):
    with s4weights.open(path) as f:
        with pytest.raises(KeyError, match=r"did you mean 'model\.bias'"):
            f.get_tensor("model.bais")
        with pytest.raises(KeyError, match="no tensor at 'xyz'"):
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


class Refused:
    """What `weights_only` does not allow."""


class Summed:
    """Cannot be rebuilt without the values of its tensor."""

    def __init__(self):
        self.tensor = torch.ones(3)

    def __setstate__(self, state):
        self.sum = state["tensor"].sum().item()


def in_memory(obj):
    stream = io.BytesIO()
    s4weights.save(obj, stream)
    stream.seek(0)
    return stream


def test_load_into_takes_conjugated_and_negated_views():
    c = torch.tensor([1 + 2j, 3 - 4j])
    for saved in (c.conj(), torch._neg_view(c), c.conj().imag, torch._neg_view(c.conj())):
        for obj in ({"c": saved}, {"a": saved, "c": saved}, {"a": c, "c": saved}):
            target = {name: torch.zeros_like(tensor).resolve_conj() for name, tensor in obj.items()}
            s4weights.load_into(target, in_memory(obj))
            assert all(torch.equal(target[name], obj[name]) for name in obj)
    # One tensor cannot be what the file has two of.
    one = torch.zeros(2, dtype=torch.complex64)
    with pytest.raises(s4weights.MismatchError, match="share memory"):
        s4weights.load_into({"a": one, "b": one}, in_memory({"a": c, "b": c.conj()}))
    s4weights.load_into({"a": one, "b": one}, in_memory({"a": c.conj(), "b": c.conj()}))
    assert torch.equal(one, c.conj())
    s4weights.load_into({"a": one, "b": one.conj()}, in_memory({"a": c, "b": c.conj()}))
    assert torch.equal(one, c)


def test_nothing_is_left_of_an_object_that_was_refused():
    bad = {"s": torch.eye(3).to_sparse(), "c": Refused()}
    for read in (s4weights.open, lambda f: s4weights.load_into({}, f)):
        with pytest.raises(s4weights.UnsafeLoadError):
            read(in_memory(bad))
        assert torch.equal(s4weights.load(in_memory([{"w": torch.ones(2)}] * 2))[0]["w"], torch.ones(2))


def test_tensors_of_other_kinds_are_passed_over(path):
    module = torch.nn.LazyLinear(3)
    kinds = {
        "coo": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8),
        "channels": torch.quantize_per_channel(
            torch.randn(4, 2), torch.ones(4), torch.zeros(4), 0, torch.qint8
        ),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "lazy": module.weight,
        "meta": torch.ones(3, device="meta"),
    }
    words = {"coo": "sparse_coo", "csr": "sparse_csr", "channels": "quantized", "lazy": "initialized"}
    words["meta"] = "no values"
    for name, tensor in kinds.items():
        s4weights.save({"a": tensor, "w": torch.arange(3.0)}, path)
        for weights_only in (True, False):
            if weights_only and name in ("nested", "lazy"):
                continue
            with s4weights.open(path, weights_only=weights_only) as f:
                assert [key for key in f if name != "meta" or key != "a"] == ["w"], name
                assert torch.equal(f["w"], torch.arange(3.0))
            target = {"w": torch.zeros(3)}
            done = s4weights.load_into(target, path, strict=False, weights_only=weights_only)
            assert done.unexpected_keys == ["a"] and torch.equal(target["w"], torch.arange(3.0))
            target["w"].zero_()
            shape = tensor.shape if name == "meta" else (3,)
            with pytest.raises(s4weights.MismatchError, match=f"`a` .*{words.get(name, name)}.* file"):
                s4weights.load_into({**target, "a": torch.ones(shape)}, path, weights_only=weights_only)
            assert not target["w"].any()


def test_an_object_that_takes_values_to_be_rebuilt_is_told():
    saved = in_memory({"w": torch.ones(2), "s": Summed()})
    assert s4weights.load(saved, weights_only=False)["s"].sum == 3
    saved.seek(0)
    with pytest.raises(s4weights.UnsupportedFormatError, match="without its values"):
        s4weights.open(saved, weights_only=False)
    saved.seek(0)
    with pytest.raises(s4weights.UnsupportedFormatError, match="without its values"):
        s4weights.load_into({"w": torch.ones(2)}, saved, weights_only=False)


@pytest.mark.parametrize("make", [torch.zeros, lambda *shape: torch.zeros(*shape[::-1]).t()])
def test_tensors_that_share_memory_only_here_are_refused(make):
    w = make(3, 2)
    saved = {"e": torch.ones(3, 2), "h": torch.full((2, 3), 2.0)}
    with pytest.raises(s4weights.MismatchError, match="`e` and `h` share memory here, but not in the file"):
        s4weights.load_into({"e": w, "h": w.t()}, in_memory(saved))
    assert not w.any()
    base, rows = make(6, 2), torch.ones(4, 2)
    for a, b in ((base[:4], base[2:]), (base[::2], base[1:4]), (base[:3, :1], base[2:5])):
        saved = {"a": torch.ones(a.shape), "b": torch.ones(b.shape)}
        with pytest.raises(s4weights.MismatchError, match="share memory"):
            s4weights.load_into({"a": a, "b": b}, in_memory(saved))
    # Three, of which the first and the last overlap.
    saved = {"a": torch.ones(6, 2), "b": rows[:0], "c": torch.ones(1, 2), "d": torch.ones(1, 2)}
    with pytest.raises(s4weights.MismatchError, match="`a` and `d`"):
        s4weights.load_into(
            {"a": base, "b": base[:0], "c": base[1:2], "d": base[4:5]}, in_memory(saved)
        )


def test_tensors_that_share_memory_in_the_file_too():
    x = torch.randn(6, 4)
    for parts in (
        lambda t: {"a": t, "b": t.t()},
        lambda t: {"a": t.t(), "b": t.t()},
        lambda t: {"a": t, "b": t[1:4, 1:3], "c": t[2], "d": t.view(-1)},
        lambda t: {"a": t[:4], "b": t[2:]},
    ):
        target = torch.zeros(6, 4)
        s4weights.load_into(parts(target), in_memory(parts(x)))
        assert torch.equal(target, x)
    # The same elements in another order.
    target = torch.zeros(4, 6).t()
    s4weights.load_into({"a": target, "b": target.t()}, in_memory({"a": x, "b": x.t()}))
    assert torch.equal(target, x)


def test_tensors_that_take_turns_in_memory():
    for parts in (
        lambda t: [t[::2], t[1::2]],
        lambda t: [t[:, :2], t[:, 2:3], t[:, 3:]],
        lambda t: [t[:, 0], t[:, 1], t[:, 2], t[:, 3]],
        lambda t: [t.view(3, 2, 4)[:, 0], t.view(3, 2, 4)[:, 1, :2], t.view(3, 2, 4)[:, 1, 2:]],
        lambda t: [t.view(-1)[::4], t.view(-1)[1::2]],
    ):
        x, target = torch.randn(6, 4), torch.zeros(6, 4)
        s4weights.load_into(parts(target), in_memory([part.clone() for part in parts(x)]))
        assert all(map(torch.equal, parts(target), parts(x)))


def test_targets_that_cannot_be_filled_are_told_before_any_is():
    target = {"a": torch.zeros(2), "b": torch.zeros(1).expand(4)}
    with pytest.raises(s4weights.MismatchError, match="`b` has several elements at the same memory location"):
        s4weights.load_into(target, in_memory({"a": torch.ones(2), "b": torch.ones(4)}))
    assert not target["a"].any()
    lazy = torch.nn.LazyLinear(3)
    saved = in_memory(torch.nn.Linear(2, 3).state_dict())
    with pytest.raises(s4weights.MismatchError, match=r"`bias` is not initialized.*`weight` is not"):
        s4weights.load_into(lazy, saved)


def test_tensors_of_inference_mode_are_filled():
    with torch.inference_mode():
        target = {"t": torch.zeros(2, 3).t(), "a": torch.zeros(2), "b": torch.zeros(2)}
    one = torch.ones(2)
    s4weights.load_into(target, in_memory({"t": torch.ones(3, 2), "a": one, "b": one}))
    assert all(tensor.all() and tensor.is_inference() for tensor in target.values())
    plain = torch.zeros(2, 3, requires_grad=True)
    with torch.inference_mode():
        s4weights.load_into([plain.detach().t()], in_memory([torch.ones(3, 2)]))
    assert plain.all()


def test_extra_state_is_found_wherever_modules_are():
    class Extra(torch.nn.Linear):
        def get_extra_state(self):
            return {"t": torch.ones(2)}

        def set_extra_state(self, state):
            pass

    class Holder:
        pass

    module = Extra(2, 3)
    with torch.no_grad():
        module.weight.fill_(7)
    holder = Holder()
    holder.m = Extra(2, 3)
    state = module.state_dict()
    done = s4weights.load_into(
        {"l": [Extra(2, 3)], "t": (holder,)}, in_memory({"l": [state], "t": ({"m": state},)})
    )
    assert done == ([], ["l.0._extra_state.t", "t.0.m._extra_state.t"])
    assert (holder.m.weight == 7).all()
    cyclic = {"w": torch.zeros(2)}
    cyclic["self"] = cyclic
    with pytest.raises(s4weights.MismatchError, match="`x` is only in the file"):
        s4weights.load_into(cyclic, in_memory({"w": torch.ones(2), "x": torch.ones(1)}))
    s4weights.load_into(cyclic, in_memory({"w": torch.ones(2)}))
    assert cyclic["w"].all()


def test_load_takes_keys_that_are_floats():
    inf, nan = float("inf"), float("nan")
    saved = {"x": {inf: torch.ones(1), -inf: 2, (nan, 1.5): torch.zeros(1), "y": 3}}
    with s4weights.open(in_memory(saved)) as f:
        assert list(f) == ["x.inf", "x.(nan, 1.5)"]
    for key in ("x.inf", "x.(nan, 1.5)", "x.-inf"):
        for load in (s4weights.load, s4weights.numpy.load):
            part = load(in_memory(saved), keys=[key])
            (name,) = part["x"]
            assert key == f"x.{name}"
    with pytest.raises(KeyError):
        s4weights.load(in_memory(saved), keys=["x.dict"])


def test_a_tensor_that_is_expanded_beyond_memory_is_named(path):
    s4weights.save({"w": torch.ones(1).expand(1 << 30, 1 << 20), "v": torch.ones(3)}, path)
    for open_ in (s4weights.open, s4weights.numpy.open):
        with open_(path) as f:
            with pytest.raises(s4weights.LimitError, match="`w`"):
                f["w"]
            assert f.get_slice("w")[5, :3].tolist() == [1, 1, 1]
            assert f["v"].tolist() == [1, 1, 1]


def test_memory_that_was_freed_is_not_written_to():
    saved = {"a": torch.ones(4), "b": torch.ones(3)}
    for size in (0, 8):
        target = {"a": torch.zeros(4), "b": torch.zeros(3)}
        target["b"].untyped_storage().resize_(size)
        with pytest.raises(s4weights.MismatchError, match="`b` does not have enough memory for its elements"):
            s4weights.load_into(target, in_memory(saved))
        assert torch.equal(target["a"], torch.zeros(4))


def test_asking_for_a_key_reads_nothing(tmp_path, monkeypatch):
    path = tmp_path / "x.s4w"
    s4weights.save({"model": {"w": torch.ones(2)}}, path)
    for file in (s4weights.open(path), s4weights.numpy.open(path)):
        with file as f:
            monkeypatch.setattr(type(f), "_part", None)
            assert "model.w" in f and "model.x" not in f and 3 not in f


def test_a_part_that_pytorch_cannot_take_is_no_matter_of_memory(tmp_path):
    s4weights.save({"w": torch.ones(8, dtype=torch.uint8).view(torch.uint4)}, tmp_path / "x.s4w")
    with s4weights.open(tmp_path / "x.s4w") as f:
        assert f["w"].dtype == torch.uint4
        with pytest.raises(NotImplementedError, match=r"`w`: PyTorch does not support this index for .* of uint4"):
            f.get_slice("w")[::2]
        with pytest.raises(NotImplementedError, match=r"`w`: PyTorch does not support this index for .* of uint4"):
            f.get_slice("w")[[0, 2]]
