"""Tensors that cannot be saved: the error has a type of ours and says which one, before anything is written."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import s4weights

pytestmark = pytest.mark.filterwarnings("ignore")


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3)


def four_bits() -> torch.Tensor:
    return torch.zeros(8, dtype=torch.uint8).view(torch.int4)


def masked() -> torch.Tensor:
    from torch.masked import masked_tensor

    made: torch.Tensor = masked_tensor(torch.ones(3), torch.tensor([True, False, True]))
    return made


#: Those that no file can hold, with what is said about them.
NEVER: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "fake": (fake, "a fake tensor"),
    "fake parameter": (lambda: torch.nn.Parameter(fake()), "a fake tensor"),
    "mkldnn": (lambda: torch.ones(3, 3).to_mkldnn(), "_mkldnn"),
    "zero": (lambda: torch._efficientzerotensor((3,)), "ZeroTensor"),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(3)), "invalid python storage"),
    "unknown quantizer": (lambda: torch.empty(4, dtype=torch.quint8), "torch.quint8"),
}
#: Those that only `torch.distributed.checkpoint` cannot take apart.
WHOLE: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]), "a nested tensor"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged),
        "a nested tensor",
    ),
    "int4": (four_bits, "torch.int4"),
    "bits": (lambda: torch.zeros(4, dtype=torch.uint8).view(torch.bits8), "torch.bits8"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
    "coo": (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
    "lazy": (torch.nn.UninitializedParameter, "not initialized"),
}


@pytest.mark.parametrize("name", NEVER)
def test_what_no_file_can_hold_is_named(tmp_path: Path, name: str) -> None:
    make, said = NEVER[name]
    path = tmp_path / "a.s4w"
    for obj in ({"model": [make()]}, {"model": [make()], "class": io.BytesIO}):
        for how in ({}, {"blocking": False}):
            with pytest.raises(s4weights.UnsupportedFormatError, match=rf"`model\.0`: .*{said}"):
                s4weights.save(obj, path, **how)
    with pytest.raises(s4weights.UnsupportedFormatError, match=f"cannot save the tensor: .*{said}"):
        s4weights.save(make(), path)
    with s4weights.CheckpointStore(tmp_path / "store") as store:
        for how in ({}, {"blocking": False}, {"blocking": False, "stage": "host"}):
            with pytest.raises(s4weights.UnsupportedFormatError, match=rf"`model\.0`: .*{said}"):
                store.save_checkpoint({"model": [make()]}, 1, **how)
    assert not [*tmp_path.iterdir()]


def test_a_dtype_that_only_plain_objects_can_have(tmp_path: Path) -> None:
    path = tmp_path / "a.s4w"
    with pytest.raises(s4weights.UnsupportedFormatError, match=r"`model\.w`: .*torch\.int4"):
        s4weights.save({"model": {"w": four_bits()}, "class": io.BytesIO}, path)
    assert not path.exists()
    s4weights.save({"model": {"w": four_bits()}}, path)
    assert s4weights.load(path)["model"]["w"].dtype is torch.int4


def test_errors_of_the_callers_classes_are_passed_on(tmp_path: Path) -> None:
    class Mine:
        def __reduce__(self) -> Any:
            raise KeyError("mine")

    class Weight(torch.Tensor):
        def __reduce_ex__(self, protocol: Any) -> Any:
            raise RuntimeError("mine")

    for obj, kind in ((Mine(), KeyError), (torch.ones(3).as_subclass(Weight), RuntimeError)):
        with pytest.raises(kind, match="mine"):
            s4weights.save({"w": torch.ones(3), "x": obj}, tmp_path / "a")
    odd = torch.nn.Parameter(torch.ones(3))
    odd.hook = lambda: None  # type: ignore[attr-defined]
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        s4weights.save({"w": odd}, tmp_path / "a")


@pytest.mark.skipif(not dist.is_available(), reason="PyTorch without distributed")
@pytest.mark.parametrize("name", [*NEVER, *WHOLE])
def test_what_distributed_checkpoints_cannot_hold_is_named(tmp_path: Path, name: str) -> None:
    from torch.distributed.checkpoint.api import CheckpointException

    from s4weights import dcp

    make, said = {**NEVER, **WHOLE}[name]
    said = {"a fake tensor": "without values", "torch.quint8": "quantized"}.get(said, said)
    if name in ("zero", "functional"):
        said = "without memory"
    what = rf"UnsupportedFormatError: .model\.w.: .*{said}"
    with pytest.raises(CheckpointException, match=what):
        dcp.save({"model": {"w": make()}}, tmp_path, 1, no_dist=True)
    # What can be copied is refused only after that.
    with pytest.raises((s4weights.UnsupportedFormatError, CheckpointException), match=rf"model\.w.: .*{said}"):
        stager = dcp.Stager()
        dcp.async_save({"model": {"w": make()}}, tmp_path, 1, no_dist=True, stager=stager).result()
    assert not s4weights.CheckpointStore(tmp_path).list()


@pytest.mark.skipif(not dist.is_available(), reason="PyTorch without distributed")
def test_what_a_stager_cannot_copy_is_named() -> None:
    from s4weights import dcp

    with pytest.raises(s4weights.UnsupportedFormatError, match=r"`a\.w`: a MaskedTensor"):
        dcp.Stager().stage({"b": torch.ones(3), "a": {"w": masked()}})


def test_what_is_not_initialized_is_not_published() -> None:
    from s4weights.sync import Publisher

    lazy = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LazyLinear(3))
    with Publisher("memory:") as publisher, pytest.raises(ValueError, match=r"`1\.weight` is not initialized"):
        publisher.publish_delta(lazy, 1)


class Shy(torch.Tensor):
    """Refuses every question that passes through its class."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("shy")


class Refusing:
    """A value that cannot be copied."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __deepcopy__(self, memo: Any) -> Any:
        raise self.error


@pytest.mark.skipif(not dist.is_available(), reason="PyTorch without distributed")
def test_other_errors_of_a_stager_are_passed_on() -> None:
    from s4weights import dcp

    mine = RuntimeError("mine")
    with pytest.raises(RuntimeError, match="mine") as raised:
        dcp.Stager().stage({"a": {"w": torch.ones(3), "p": torch.nn.Parameter(torch.ones(3))}, "b": Refusing(mine)})
    # Programs follow the causes to their end.
    assert raised.value is mine and mine.__cause__ is None
    with pytest.raises(s4weights.UnsupportedFormatError, match=r"`a\.w`: a Shy that cannot be copied"):
        dcp.Stager().stage({"a": {"w": torch.ones(3).as_subclass(Shy)}})
    rude = {"w": Wrapper(torch.ones(3))}
    with pytest.raises(ZeroDivisionError) as division:
        dcp.Stager().stage(rude)
    assert division.value.__cause__ is not division.value


class Wrapper(torch.Tensor):
    """A tensor that wraps another one, and does not name it."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        return made

    def __init__(self, inner: torch.Tensor) -> None:
        self.times = 0

    def __tensor_flatten__(self) -> Any:
        self.times += 1
        raise ZeroDivisionError(self.times)

    @classmethod
    def __tensor_unflatten__(cls, *parts: Any) -> Any:
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


@pytest.mark.skipif(not dist.is_available(), reason="PyTorch without distributed")
def test_what_a_gradients_function_leaves_behind_is_saved(tmp_path: Path) -> None:
    from s4weights import dcp

    left = []

    def work(x: torch.Tensor) -> torch.Tensor:
        left.append(x * 2)
        return left[0].sum()

    torch.func.grad(work)(torch.arange(3.0))
    dcp.save({"w": left[0]}, tmp_path, 1, no_dist=True)
    found = {"w": torch.zeros(3)}
    dcp.load(found, tmp_path, no_dist=True)
    assert found["w"].tolist() == [0, 2, 4]


@pytest.mark.skipif(not dist.is_available(), reason="PyTorch without distributed")
def test_tensors_of_a_kind_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from s4weights import _unsavable

    asked: list[str] = []
    check = _unsavable.require_pieces

    def counted(tensor: torch.Tensor, where: str) -> None:
        asked.append(where)
        check(tensor, where)

    monkeypatch.setattr(_unsavable, "require_pieces", counted)
    state: dict[str, Any] = {f"w{i}": torch.ones(3) for i in range(100)}
    state.update({"p": torch.nn.Parameter(torch.ones(3)), "half": torch.ones(3).half(), "x": 1})
    _unsavable.require_all_pieces(state)
    assert asked == ["'w0'", "'p'", "'half'"]
    # No code of the class is run.
    _unsavable.require_all_pieces({"shy": torch.ones(3).as_subclass(Shy)})
    for name, (make, _) in {**NEVER, **WHOLE}.items():
        with pytest.raises(s4weights.UnsupportedFormatError, match="'last': "):
            _unsavable.require_all_pieces({**state, "last": make()})
        assert asked[-1] == "'last'", name
