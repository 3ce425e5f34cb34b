"""Code written for `torch.save` and `torch.load` may use `save` and `load` in the same way."""

import copy
import io
import pickle
import warnings

import numpy as np
import pytest
import torch

import s4weights
from compare import assert_identical


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(4, 4), persistent=False)
        self.register_buffer("count", torch.tensor([5]))


def fresh():
    torch.manual_seed(0)
    return Tied()


def blank():
    model = Tied()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.count.zero_()
    return model


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: {"model": m}, lambda m: [m, m]])
@pytest.mark.parametrize("saved", ["state dict", "module"])
def test_a_module_takes_its_own_state_dict(tmp_path, wrap, saved):
    path = tmp_path / "a"
    model, target = fresh(), blank()
    what = model.state_dict() if saved == "state dict" else model
    s4weights.save(wrap(what), path)
    s4weights.load_into(wrap(target), path, weights_only=saved == "state dict")
    assert torch.equal(target.head.weight, model.head.weight)
    assert target.head.weight is target.embed.weight
    assert torch.equal(target.count, model.count)


def test_file_and_tensors_may_change_places(tmp_path):
    path = tmp_path / "a"
    model, target = fresh(), blank()
    s4weights.save(model.state_dict(), path)
    s4weights.load_into(path, target)
    assert torch.equal(target.embed.weight, model.embed.weight)
    with pytest.raises(TypeError) as caught:
        s4weights.load_into(target, model.state_dict())
    assert "Tied and OrderedDict" in str(caught.value)
    assert "tensor(" not in str(caught.value)
    with pytest.raises(AttributeError) as wrong:
        s4weights.load({"w": torch.ones(3)})
    assert "not dict" in str(wrong.value)


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.eye(3).to_sparse(), "sparse_coo"),
        (torch.eye(3).to_sparse_csr(), "sparse_csr"),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "qint8"),
        (torch.ones(3).as_subclass(type("Strange", (torch.Tensor,), {})), "Strange"),
    ],
)
def test_tensors_that_cannot_be_filled_are_named(tmp_path, tensor, kind):
    path = tmp_path / "a"
    dtype = torch.float32 if tensor.is_quantized else tensor.dtype
    s4weights.save({"a": torch.ones(tensor.shape, dtype=dtype)}, path)
    with pytest.raises(s4weights.MismatchError, match=kind):
        s4weights.load_into({"a": tensor}, path)


def test_misspelt_arguments_are_refused(tmp_path):
    path = tmp_path / "a"
    s4weights.save({"a": 1}, path)
    with pytest.raises(TypeError, match="load\\(\\) got an unexpected keyword argument 'map_locaton'"):
        s4weights.load(path, map_locaton="cpu")
    with s4weights.CheckpointStore(tmp_path / "store") as store:
        store.save_checkpoint({"a": 1}, 0)
        with pytest.raises(TypeError, match="unexpected keyword argument 'fallbak'"):
            store.load_checkpoint(fallbak=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'fallbak'"):
        s4weights.load_checkpoint(tmp_path / "store", fallbak=True)
    assert s4weights.load(path, weights_only=False, encoding="latin1") == {"a": 1}


def test_objects_in_one_stream_are_loaded_one_by_one(tmp_path):
    objects = [{"a": torch.randn(1000)}, [1, 2], {"b": torch.arange(70_000)}]
    for make in (io.BytesIO, lambda: (tmp_path / "a").open("w+b")):
        with make() as stream:
            pickle.dump("before", stream)
            for obj in objects:
                s4weights.save(obj, stream)
            stream.write(b"behind")
            stream.seek(0)
            assert pickle.load(stream) == "before"
            for obj in objects:
                assert_identical(s4weights.load(stream), obj)
            assert stream.read() == b"behind"
    # From the very start of a file, too.
    with (tmp_path / "b").open("w+b") as stream:
        s4weights.save(objects[0], stream)
        s4weights.save(objects[1], stream)
        stream.seek(0)
        assert_identical(s4weights.load(stream), objects[0])
        assert_identical(s4weights.load(stream), objects[1])
        assert stream.read() == b""


class Keeps:
    """A stream that keeps what it is given."""

    def __init__(self):
        self.parts = []

    def write(self, part):
        self.parts.append(part)


def test_all_kinds_of_streams_get_the_same_bytes(tmp_path):
    obj = {"a": torch.randn(900_000), "b": torch.arange(9), "c": torch.randn(70_000)}
    path, kept, memory = tmp_path / "a", Keeps(), io.BytesIO()
    s4weights.save(obj, path)
    s4weights.save(obj, kept)
    s4weights.save(obj, memory)
    with (tmp_path / "b").open("wb") as buffered, (tmp_path / "c").open("wb", buffering=0) as raw:
        s4weights.save(obj, buffered)
        s4weights.save(obj, raw)
    expected = path.read_bytes()
    assert b"".join(kept.parts) == expected
    assert memory.getvalue() == expected
    assert (tmp_path / "b").read_bytes() == expected
    assert (tmp_path / "c").read_bytes() == expected


def test_a_stream_that_fails_gets_no_more(tmp_path):
    class Full(io.RawIOBase):
        calls = 0
        is_full = True

        def writable(self):
            return True

        def write(self, part):
            self.calls += 1
            if self.is_full:
                raise OSError(28, "No space left on device")
            return len(part)

    raw = Full()
    stream = io.BufferedWriter(raw, 16)
    with pytest.raises(OSError, match="No space"):
        s4weights.save({"a": torch.randn(900_000)}, stream)
    assert raw.calls == 1
    raw.is_full = False
    stream.detach()


def test_a_stream_is_not_asked_for_its_end_if_that_takes_reading_it(tmp_path):
    class NoEnd(io.BytesIO):
        def seek(self, offset, whence=io.SEEK_SET):
            if whence != io.SEEK_SET:
                raise io.UnsupportedOperation("whence")
            return super().seek(offset)

    stream = NoEnd()
    s4weights.save({"a": torch.ones(3)}, stream)
    s4weights.save([7], stream)
    stream.seek(0)
    assert_identical(s4weights.load(stream), {"a": torch.ones(3)})
    assert s4weights.load(stream) == [7]


def test_what_is_loaded_from_memory_is_not_what_is_written_to_it_later():
    stream = io.BytesIO()
    s4weights.save({"a": torch.ones(300_000)}, stream)
    stream.seek(0)
    with s4weights.open(stream) as f:
        stream.seek(0)
        stream.write(b"0" * len(stream.getvalue()))
        assert torch.equal(f.get_tensor("a"), torch.ones(300_000))


def test_what_looks_like_an_end_is_not_taken_for_one():
    stream = io.BytesIO()
    data = torch.frombuffer(bytearray(b"S4W-END\n" * 5000), dtype=torch.uint8)
    s4weights.save({"a": data, "b": b"S4W-END\n" * 20}, stream)
    s4weights.save([3], stream)
    stream.seek(0)
    assert torch.equal(s4weights.load(stream)["a"], data)
    assert s4weights.load(stream) == [3]


def test_a_damaged_beginning_is_called_damaged(tmp_path):
    path = tmp_path / "a"
    s4weights.save({"a": torch.ones(100)}, path)
    data = bytearray(path.read_bytes())
    data[1] ^= 1
    path.write_bytes(data)
    with path.open("rb") as stream:
        for f in (path, str(path), io.BytesIO(data), stream):
            with pytest.raises(s4weights.CorruptDataError, match="magic"):
                s4weights.load(f)


def test_a_store_is_pickled_and_copied(tmp_path):
    store = s4weights.CheckpointStore(tmp_path / "s", retention=2, threads=1, preset="fast")
    store.save_checkpoint({"a": torch.ones(3)}, 4)
    for other in (pickle.loads(pickle.dumps(store)), copy.copy(store), copy.deepcopy(store)):
        with other:
            assert other.url == store.url
            assert other.retention == store.retention
            assert other.latest() == 4
            other.save_checkpoint({"a": torch.ones(3)}, 5 + other.latest())
            other.delete(other.latest())
    store.close()
    # A copy of a closed store is not closed.
    with pickle.loads(pickle.dumps(store)) as other:
        assert other.latest() == 4


def test_integers_of_other_libraries_are_steps(tmp_path):
    with s4weights.CheckpointStore(tmp_path / "s") as store:
        assert store.save_checkpoint({"a": 1}, np.int64(7)).step == 7
        assert store.save_checkpoint({"a": 1}, torch.tensor(8)).step == 8
        for wrong in (True, 1.0, "1", -1, np.int64(-1), None, torch.tensor(1.5)):
            with pytest.raises(ValueError, match="step: expected a non-negative integer"):
                store.save_checkpoint({"a": 1}, wrong)


def test_mmap_says_that_it_does_nothing(tmp_path):
    path = tmp_path / "a"
    s4weights.save({"a": 1}, path)
    with pytest.warns(UserWarning, match="mmap=True: a .s4w file is decoded"):
        assert s4weights.load(path, mmap=True) == {"a": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        s4weights.load(path, mmap=False)


class Unknown:
    pass


def test_refusals_say_what_public_code_looks_for(tmp_path):
    path = tmp_path / "a"
    s4weights.save({"deep": [Unknown()]}, path)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed") as caught:
        s4weights.load(path)
    assert caught.value.key_path == "deep.0"
    assert s4weights.get_unsafe_globals(path) == [f"{Unknown.__module__}.Unknown"]
    torch.save({"deep": [Unknown()]}, tmp_path / "torch")
    assert s4weights.get_unsafe_globals(tmp_path / "torch") == [f"{Unknown.__module__}.Unknown"]
    s4weights.save({"a": torch.ones(2)}, path)
    assert s4weights.get_unsafe_globals(path) == []
