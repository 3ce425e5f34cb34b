"""DCP with tensors that wrap other tensors, as quantized weights and optimizer states do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import s4weights.dcp
from s4weights._cli_dcp import put_together
from test_dcp import run_ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="PyTorch without distributed")


class Quantized(torch.Tensor):
    """Codes and the scale of each row, in the shape of the floats that they stand for."""

    codes: torch.Tensor
    scale: torch.Tensor
    rule: Any

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, rule: Any = None) -> Quantized:
        like = {"dtype": torch.float32, "device": codes.device}
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, **like)
        made.codes, made.scale, made.rule = codes, scale, rule
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], [self.rule]

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, size: Any, stride: Any) -> Quantized:
        return cls(parts["codes"], parts["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        aten, this = torch.ops.aten, args[0]
        if func in (aten.detach.default, aten.clone.default):
            return cls(func(this.codes), func(this.scale), this.rule)
        if func is aten.copy_.default:
            # The source is a tensor of floats.
            this.scale.copy_(args[1].abs().amax(1) / 127)
            this.codes.copy_((args[1] / this.scale[:, None]).round())
            return this
        if func is aten.slice.Tensor:
            return cls(func(this.codes, *args[1:]), this.scale[args[2] : args[3]], this.rule)
        if func is aten.view.default:
            return cls(this.codes.view(args[1]), this.scale, this.rule)
        if func is aten.is_pinned.default:
            return False
        raise NotImplementedError(func)


def quantized(seed: int, rule: Any = None, rows: int = 48) -> Quantized:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 127, (rows, 64), dtype=torch.int8, generator=generator)
    return Quantized(codes, torch.rand(rows, generator=generator), rule)


def assert_same(a: Quantized, b: Quantized) -> None:
    assert torch.equal(a.codes, b.codes)
    assert torch.equal(a.scale.view(torch.int32), b.scale.view(torch.int32))


def load(state: dict[str, Any], place: Path, step: int | None = None) -> None:
    s4weights.dcp.load(state, place, step, no_dist=True)


def test_what_is_wrapped_comes_back_in_place(tmp_path: Path) -> None:
    rule = {"block": 64, "device": torch.device("cpu"), "dtype": torch.bfloat16}
    outer = Quantized(quantized(3).codes, torch.rand(48), rule)
    nested = Quantized(torch.zeros(48, 64, dtype=torch.int8), quantized(4), "nested")
    for step in (1, 2):
        outer.codes[0] = step
        state = {"w": outer, "n": nested, "plain": torch.full((3,), float(step)), "lr": 0.1}
        s4weights.dcp.save(state, tmp_path / "s", step, no_dist=True)
    target = Quantized(quantized(5).codes, torch.zeros(48), dict(rule))
    inner = Quantized(torch.ones(48, 64, dtype=torch.int8), quantized(6), "nested")
    back = {"w": target, "n": inner, "plain": torch.zeros(3), "lr": 0.0}
    for step in (1, 2):
        codes = target.codes
        load(back, tmp_path / "s", step)
        assert back["w"] is target and target.codes is codes
        outer.codes[0] = step
        assert_same(target, outer)
        assert not inner.codes.any()
        assert_same(inner.scale, nested.scale)  # type: ignore[arg-type]
        assert back["plain"].tolist() == [step] * 3 and back["lr"] == 0.1


def test_planners_of_pytorch_and_stagers_take_them(tmp_path: Path) -> None:
    writer = s4weights.dcp.StorageWriter(tmp_path / "a", step=1)
    dcp.save({"w": quantized(1)}, storage_writer=writer, no_dist=True)
    target = quantized(2)
    dcp.load(
        {"w": target},
        storage_reader=s4weights.dcp.StorageReader(tmp_path / "a"),
        no_dist=True,
    )
    assert_same(target, quantized(1))
    stager = s4weights.dcp.Stager()
    staged = stager.stage({"w": quantized(7)})
    s4weights.dcp.save(staged, tmp_path / "b", 1, no_dist=True)
    stager.close()
    load({"w": target}, tmp_path / "b")
    assert_same(target, quantized(7))


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (quantized(2, "other"), "context ['other'] instead of ['rule']"),
        (quantized(2, "rule").scale.new_zeros(48, 64), "loaded into Tensor"),
        (Quantized(torch.zeros(48, 64), torch.rand(48), "rule"), "codes is torch.int8"),
        (Quantized(quantized(1).codes, quantized(1), "rule"), "tensors {"),
    ],
)
def test_what_is_no_such_wrapper_is_refused(
    tmp_path: Path, target: torch.Tensor, said: str
) -> None:
    s4weights.dcp.save({"w": quantized(1, "rule")}, tmp_path, 1, no_dist=True)
    with pytest.raises(CheckpointException) as failed:
        load({"w": target}, tmp_path)
    error = failed.value.failures[0][0]
    assert isinstance(error, ValueError)
    assert said in str(error)
    assert "'w' was saved as a " in str(error) or "'w': codes" in str(error)


def test_floats_may_be_loaded_into_a_wrapper(tmp_path: Path) -> None:
    """As with PyTorch's own storage: the wrapper defines how."""
    values = torch.linspace(-1, 1, 48 * 64).reshape(48, 64)
    s4weights.dcp.save({"w": values}, tmp_path, 1, no_dist=True)
    target = quantized(1)
    load({"w": target}, tmp_path)
    assert (target.codes * target.scale[:, None] - values).abs().max() < 0.01


def test_the_command_line_says_what_it_cannot_put_together(tmp_path: Path) -> None:
    store = s4weights.CheckpointStore(tmp_path)
    s4weights.dcp.save({"w": quantized(1)}, store, 1, no_dist=True)
    entry = store.list()[0]
    with pytest.raises(s4weights.UnsupportedFormatError, match="'w' wraps other tensors"):
        put_together(store._open("open").open(entry.id), "here")


def _sharded(seed: int, rank: int) -> DTensor:
    mesh = init_device_mesh("cpu", (2,))
    local = quantized(seed + rank, "rule")
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


def _save_and_load(rank: int, place: str) -> None:
    s4weights.dcp.save({"w": _sharded(10, rank)}, place, 1)
    back = _sharded(20, rank)
    s4weights.dcp.load({"w": back}, place)
    assert_same(back._local_tensor, quantized(10 + rank, "rule"))  # type: ignore[arg-type]


def _load_a_part(rank: int, place: str) -> None:
    with pytest.raises(CheckpointException) as failed:
        s4weights.dcp.load({"w": _sharded(20, rank)}, place)
    assert "its shards must be loaded as they were saved" in str(failed.value.failures[rank][0])


def test_shards_may_be_wrappers(tmp_path: Path) -> None:
    run_ranks(2, _save_and_load, str(tmp_path / "s"))
    # A wrapper that can be sliced takes several shards.
    whole = quantized(1, "rule", 96)
    load({"w": whole}, tmp_path / "s")
    assert_same(whole[:48], quantized(10))  # type: ignore[arg-type]
    assert_same(whole[48:], quantized(11))  # type: ignore[arg-type]
    s4weights.dcp.save({"w": whole}, tmp_path / "t", 1, no_dist=True)
    run_ranks(2, _load_a_part, str(tmp_path / "t"))
