"""Roles of tensors in the trees that frameworks save, and the space that knowing them saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from compare import assert_identical


def model() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    shapes = {"a.weight": (96, 64), "b.weight": (96, 64), "c.weight": (50, 128)}
    return {name: 0.1 * torch.randn(shape) for name, shape in shapes.items()}


def adam(masters: dict[str, torch.Tensor]) -> dict[str, Any]:
    def state(number: int, w: torch.Tensor) -> dict[str, Any]:
        torch.manual_seed(number)
        g = torch.randn_like(w)
        return {"step": torch.tensor(3.0), "exp_avg": g, "exp_avg_sq": g * g * 1e-3}

    params = list(range(len(masters)))
    return {
        "state": {i: state(i, w) for i, w in enumerate(masters.values())},
        "param_groups": [{"lr": 1e-3, "params": params}],
    }


def plain(dtype: torch.dtype) -> dict[str, Any]:
    """An optimizer that keeps its weights in its state."""
    masters = model()
    optimizer = adam(masters)
    for state, w in zip(optimizer["state"].values(), masters.values(), strict=True):
        state["master_param"] = w
    return {"model": {k: w.to(dtype) for k, w in masters.items()}, "optimizer": optimizer}


def megatron(dtype: torch.dtype) -> dict[str, Any]:
    masters = model()
    optimizer = {
        "optimizer": adam(masters),
        "grad_scaler": {"scale": 1.0},
        "fp32_from_fp16_params": [list(masters.values())],
    }
    weights = {k: w.to(dtype) for k, w in masters.items()}
    return {"model": {"language_model": weights}, "optimizer": optimizer, "iteration": 3}


def megatron_distributed(dtype: torch.dtype) -> dict[str, Any]:
    """Each parameter flattened, as in `param_state` of Megatron's distributed optimizer."""
    masters = model()
    states = adam(masters)["state"]
    for state, w in zip(states.values(), masters.values(), strict=True):
        state["param"] = w.flatten()
        state["exp_avg"], state["exp_avg_sq"] = (
            state[k].flatten() for k in ("exp_avg", "exp_avg_sq")
        )
    groups = [{"lr": 1e-3, "params": list(states)}]
    weights = {k: w.to(dtype) for k, w in masters.items()}
    return {"model": weights, "optimizer": {"state": states, "param_groups": groups}}


def apex(dtype: torch.dtype) -> dict[str, Any]:
    masters = model()
    weights = {k: w.to(dtype) for k, w in masters.items()}
    optimizer = {"optimizer_state_dict": adam(masters), "fp32_from_fp16": [[*masters.values()]]}
    return {"state_dict": weights, "optimizer": optimizer}


def deepspeed(dtype: torch.dtype) -> dict[str, Any]:
    """One flat parameter, as in a module with flattened parameters."""
    flat = torch.cat([w.flatten() for w in model().values()])
    base = adam({"flat": flat})
    optimizer = {"base_optimizer_state": base, "single_partition_of_fp32_groups": [flat]}
    return {"module": {"flat_param": flat.to(dtype)}, "optimizer_state_dict": optimizer}


TREES = [plain, megatron, megatron_distributed, apex, deepspeed]


def rows(path: Path) -> list[dict[str, Any]]:
    file = path.read_bytes()
    at, size = (int.from_bytes(file[-64 + i : -56 + i], "little") for i in (0, 8))
    found: list[dict[str, Any]] = json.loads(file[at : at + size])["roles"]["tensors"]
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tree", TREES)
def test_masters_are_told_and_a_model_is_stored_as_their_copy(
    tree: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    state = tree(dtype)
    path = tmp_path / "x.s4w"
    s4weights.save(state, path)
    by_parameter: dict[int, list[str]] = {}
    for row in rows(path):
        by_parameter.setdefault(row["parameter"], []).append(row["kind"])
    kinds = ["exp_avg", "exp_avg_sq", "master", "weight"]
    assert len(by_parameter) == (1 if tree is deepspeed else 3)
    assert all(sorted(found) == kinds for found in by_parameter.values()), by_parameter
    assert_identical(s4weights.load(path), state)
    # The model takes almost no space; without its masters it would take most of it.
    with_model = path.stat().st_size
    part = {k: v for k, v in state.items() if k not in ("model", "module", "state_dict")}
    s4weights.save(part, path)
    values = sum(w.numel() for w in model().values())
    assert with_model - path.stat().st_size < 0.1 * values + 2000


def test_a_model_is_read_without_its_masters(tmp_path: Path) -> None:
    state = megatron(torch.bfloat16)
    path = tmp_path / "x.s4w"
    s4weights.save(state, path)
    assert_identical(s4weights.load(path, keys=["model"])["model"], state["model"])
    into = {"model": {"language_model": {k: w.to(torch.bfloat16) for k, w in model().items()}}}
    for w in into["model"]["language_model"].values():
        w.zero_()
    s4weights.load_into(into, path, strict=False)
    assert_identical(into["model"], state["model"])


def test_weights_and_masters_in_a_store_lie_apart_and_come_back(tmp_path: Path) -> None:
    state = megatron(torch.bfloat16)
    with s4weights.CheckpointStore(tmp_path / "store") as store:
        store.save_checkpoint(state, 0)
        for w in state["optimizer"]["fp32_from_fp16_params"][0]:
            w.mul_(1.001)
        for name, w in zip(model(), state["optimizer"]["fp32_from_fp16_params"][0], strict=True):
            state["model"]["language_model"][name] = w.to(torch.bfloat16)
        store.save_checkpoint(state, 1)
        assert_identical(store.load_checkpoint(1), state)
        part = store.load_checkpoint(1, keys=["model"])
        assert_identical(part["model"], state["model"])


def test_long_lists_and_many_groups_are_no_hyperparameters(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(40, 50))
    optimizer = torch.optim.AdamW([{"params": [weight], "schedule": [0.1] * 300_000}], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    state = {"model": {"w": weight.detach()}, "optimizer": optimizer.state_dict()}
    s4weights.save(state, tmp_path / "a.s4w")
    assert_identical(s4weights.load(tmp_path / "a.s4w"), state)
    groups = [dict(optimizer.state_dict()["param_groups"][0], schedule=0.1, params=[])] * 40_000
    state["optimizer"]["param_groups"] += groups
    s4weights.save(state, tmp_path / "b.s4w")
    assert len(s4weights.load(tmp_path / "b.s4w")["optimizer"]["param_groups"]) == 40_001


def test_weights_after_a_step_of_sgd_take_next_to_nothing(tmp_path: Path) -> None:
    torch.manual_seed(2)
    layer = torch.nn.Linear(300, 200)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.03, momentum=0.9, weight_decay=0.01)

    def state() -> dict[str, Any]:
        layer(torch.randn(16, 300)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"model": layer.state_dict(), "optimizer": optimizer.state_dict()}

    with s4weights.CheckpointStore(tmp_path / "store") as store:
        store.save_checkpoint(state(), 1)
        saved = state()
        delta = store.save_checkpoint(saved, 2)
        assert_identical(store.load_checkpoint(2), saved)
    # Hardly more than the momentum.
    assert delta.kind == "delta"
    assert delta.bytes < 4 * 300 * 200


class Attributes(dict[str, Any]):
    """A dict whose keys are attributes, too: "values" and "items" hide the methods."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.__dict__ = self

    def __reduce__(self) -> Any:
        return Attributes, (dict(self),)


def test_dicts_with_keys_that_hide_methods_have_roles(path: Path) -> None:
    weights = model()
    optimizer = adam(weights)
    group = Attributes({**optimizer["param_groups"][0], "items": 1.0})
    state = {i: Attributes({**s, "items": 1, "values": 2}) for i, s in optimizer["state"].items()}
    both = {"state": state, "param_groups": [group]}
    s4weights.save(Attributes({"values": weights, "items": 3, "optimizer": both}), path)
    assert sorted({row["kind"] for row in rows(path)}) == ["exp_avg", "exp_avg_sq", "weight"]
    found = s4weights.load(path, weights_only=False)
    for name, w in weights.items():
        assert torch.equal(found["values"][name], w)
