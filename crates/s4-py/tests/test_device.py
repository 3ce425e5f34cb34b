"""`device=`, `load_into` and arrays of other libraries, where there is no GPU."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from compare import assert_identical
from s4weights import _core, _device
from s4weights._progress import Progress
from s4weights._storages import read_batch
from s4weights._sync_live import LiveWeights

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@without_gpu
def test_cuda_that_is_not_there_is_an_error_that_says_why(path: Path) -> None:
    refusal = r'device="cuda": .*CUDA is not available: .*"auto"'
    with pytest.raises(s4weights.S4Error, match=refusal):
        s4weights.save([torch.ones(2)], path, device="cuda")
    assert not path.exists()
    s4weights.save([torch.ones(2)], path)
    with pytest.raises(s4weights.S4Error, match="CUDA is not available"):
        s4weights.load(path, device="cuda")
    with pytest.raises(s4weights.S4Error, match="CUDA is not available"):
        s4weights.load_into([torch.ones(2)], path, device="cuda")
    with pytest.raises(s4weights.S4Error, match="CUDA is not available"):
        _core.CudaEngine(1 << 28, 0)


@without_gpu
def test_falling_back_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_device, "_warned", False)
    with pytest.warns(UserWarning, match="copied through host memory: .*CUDA is not available"):
        assert _device.Compute("auto", None).engine({0}) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _device.Compute("auto", None).engine({0, 1}) is None
        assert _device.Compute("cpu", None).engine({0}) is None


def test_tensors_of_the_host_need_no_device(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        s4weights.save({"w": torch.arange(9)}, path, device="auto", gpu_scratch=1)
        assert_identical({"w": torch.arange(9)}, s4weights.load(path, device="auto"))


def test_arguments(path: Path) -> None:
    numbers = ({"gpu_scratch": 0}, {"gpu_scratch": "1G"}, {"pinned_memory": -1})
    for bad in ({"device": "tpu"}, *numbers):
        with pytest.raises(ValueError, match=str(next(iter(bad.values())))):
            s4weights.save([1], path, **bad)  # type: ignore[arg-type]
    s4weights.save([1], path, pinned_memory=0)
    s4weights.free_pinned_memory()


def state() -> dict[str, Any]:
    base = torch.randn(60, 80)
    return {
        "model": {"w": base, "t": base.t(), "b": torch.randn(7).bfloat16(), "e": torch.empty(0, 2)},
        "optimizer": [torch.randn(9000), torch.tensor(3)],
        "step": 12,
    }


def zeroed(obj: dict[str, Any]) -> dict[str, Any]:
    base = torch.zeros_like(obj["model"]["w"])
    return {
        "model": {"w": base, "t": base.t(), "b": torch.zeros(7).bfloat16(), "e": torch.empty(0, 2)},
        "optimizer": [torch.zeros(9000), torch.tensor(0)],
        "step": 12,
    }


@pytest.mark.parametrize("extra", [0, range(2)])
def test_load_into_fills_tensors_in_place(extra: Any, path: Path) -> None:
    obj = {**state(), "extra": extra}
    s4weights.save(obj, path)
    target = {**zeroed(obj), "extra": extra}
    addresses = [t.data_ptr() for t in target["model"].values()]
    reported: list[tuple[int, int]] = []
    with torch.serialization.safe_globals([range]):
        s4weights.load_into(
            target, path, weights_only=True, progress=lambda *report: reported.append(report)
        )
    assert_identical(obj, target)
    assert addresses == [t.data_ptr() for t in target["model"].values()]
    assert reported[-1][0] == reported[-1][1] > 0


def test_load_into_strides_and_parameters(path: Path) -> None:
    values = torch.randn(30, 50)
    s4weights.save({"a": values, "b": values.t(), "c": values[2]}, path)
    a, b = torch.zeros(50, 30).t(), torch.nn.Parameter(torch.zeros(50, 30))
    c = torch.zeros(100)[::2]
    version = b._version
    s4weights.load_into({"a": a, "b": b, "c": c}, path)
    assert a.equal(values) and b.equal(values.t()) and c.equal(values[2])
    assert b.requires_grad and b._version > version


def test_load_into_refuses_what_does_not_fit(path: Path) -> None:
    s4weights.save({"a": torch.ones(3), "b": torch.ones(2), "c": torch.ones(2)}, path)
    shared = torch.zeros(4)

    def three(**changed: Any) -> dict[str, Any]:
        return {"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(2), **changed}

    cases = [
        ({"a": torch.zeros(3), "b": torch.zeros(2)}, "`c` is only in the file"),
        (three(d=torch.zeros(1)), "`d` is not in the file"),
        (three(a=torch.zeros(3, 1)), r"`a` is torch.float32 \[3, 1\], but torch.float32 \[3\] in the file"),
        (three(a=torch.zeros(3).double()), r"`a` is torch.float64 \[3\], but torch.float32 \[3\] in the file"),
        (three(a=torch.zeros(3, device="meta")), "`a` has no memory"),
        (three(a=torch.zeros(3).to_sparse()), "`a` is of layout sparse_coo"),
        (three(b=shared[:2], c=shared[1:3]), "`b` and `c` share memory"),
        (three(b=shared[:2], c=shared[:2]), "`b` and `c` share memory"),
    ]
    for target, message in cases:
        with pytest.raises(s4weights.MismatchError, match=message):
            s4weights.load_into(target, path)
        dense = [t for t in target.values() if t.layout is torch.strided and not t.is_meta]
        assert not any(t.any() for t in dense), message
    s4weights.load_into({"b": shared[:2], "z": torch.ones(1)}, path, strict=False)
    assert shared.tolist() == [1, 1, 0, 0]
    torch.save({"a": torch.ones(3)}, path)
    with pytest.raises(s4weights.UnsupportedFormatError):
        s4weights.load_into({"a": torch.zeros(3)}, path)


class Lent:
    """An array of another library, known only by its DLPack interface."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **arguments: Any) -> Any:
        return self._tensor.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


def test_arrays_that_lend_their_memory(path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    ours, theirs = torch.randn(40, 50), numpy.arange(9000, dtype="float32")
    lent = Lent(ours)
    s4weights.save({"a": lent, "same": lent, "b": [Lent(theirs)], "step": 3}, path)
    loaded = s4weights.load(path)
    assert loaded["a"].equal(ours) and loaded["a"] is loaded["same"] and loaded["step"] == 3
    assert loaded["b"][0].equal(torch.from_numpy(theirs))
    assert [t["name"] for t in s4weights.inspect(path)["tensors"]] == ["a", "b.0"]


def test_numpy_arrays_stay_numpy_arrays(path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    s4weights.save({"a": numpy.arange(5)}, path)
    loaded = s4weights.load(path, weights_only=False)
    assert type(loaded["a"]) is numpy.ndarray and loaded["a"].tolist() == [0, 1, 2, 3, 4]


def test_the_default_device_does_not_matter(path: Path) -> None:
    weight = torch.randn(300, 200)
    turned, lone = torch.randn(4, 5).T, weight[3].clone()
    state = {"w": weight, "turned": turned, "kept": weight[2:9], "lone": lone}
    expected = {name: tensor.clone() for name, tensor in state.items()}
    targets = {
        "w": torch.zeros(300, 200),
        "turned": torch.zeros(5, 4),
        "kept": torch.zeros(7, 200),
        "lone": torch.zeros(400)[::2],
    }
    with torch.device("meta"):
        pending = s4weights.save(state, path, blocking=False, stage="host")
        weight.zero_()
        pending.wait()
        loaded = s4weights.load(path)
        with s4weights.open(path) as file:
            opened = {name: file[name] for name in file}
            rows = file.get_slice("w")[[7, 3]]
        s4weights.load_into(targets, path)
    for found in (loaded, opened, targets):
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert torch.equal(rows, expected["w"][[7, 3]])


@without_gpu
def test_values_that_nothing_can_read_are_an_error() -> None:
    compute = _device.Compute("cpu", None)
    with pytest.raises(s4weights.S4Error, match=r"cuda:0, cuda:1: .* engine could not be set up"):
        # The native reader is not asked.
        requests = [(0, 1, 4, (1, 0)), (1, 1, 4, (0, 0))]
        read_batch(None, compute, requests, Progress(None, 0, "load"))  # type: ignore[arg-type]
    live = LiveWeights({}, compute)
    live._requests = lambda: [(0, 1, 4, (0, 0))]  # type: ignore[method-assign]
    with pytest.raises(s4weights.S4Error, match=r"cuda:0: .* engine could not be set up"):
        live.apply(None, lambda: None)  # type: ignore[arg-type, return-value]
