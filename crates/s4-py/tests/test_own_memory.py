"""`load_into` and subscribers fill the memory that modules hold, not what state dicts have only made;
and they find it in time.
"""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from s4weights import _names
from s4weights.sync import Publisher, Subscriber


def in_memory(obj: Any) -> io.BytesIO:
    stream = io.BytesIO()
    s4weights.save(obj, stream)
    stream.seek(0)
    return stream


class WithExtra(torch.nn.Linear):
    """Its extra state is a tensor that is made for each call, as Transformer Engine's."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.full((4,), 7, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = state


def ones_in(module: torch.nn.Module) -> dict[str, Any]:
    return {name: torch.ones_like(value) for name, value in module.state_dict().items()}


def test_extra_state_that_is_a_tensor_is_left_to_the_module(tmp_path: Path) -> None:
    module = torch.nn.Sequential(WithExtra(2, 3))
    state = ones_in(module)
    path = tmp_path / "m.s4w"
    s4weights.save(state, path)
    assert s4weights.load_into(module, path) == ([], ["0._extra_state"])
    assert module[0].weight.eq(1).all()
    # A state dict is filled as it is.
    given = module.state_dict()
    assert s4weights.load_into(given, path) == ([], []) and given["0._extra_state"].eq(1).all()
    # Nor is it missing in a file.
    del state["0._extra_state"]
    assert s4weights.load_into(module, in_memory(state)) == ([], [])


def test_extra_state_does_not_keep_deltas_from_being_applied(tmp_path: Path) -> None:
    trainer, sampler = (torch.nn.Sequential(WithExtra(200, 200)) for _ in range(2))
    with Publisher(tmp_path) as publisher, Subscriber(tmp_path, sampler) as subscriber:
        for step in range(3):
            with torch.no_grad():
                trainer[0].weight[step] += 1
            publisher.publish_delta(trainer, step)
            update = subscriber.apply_delta()
            assert update is not None and update.deltas == min(step, 1)
            assert torch.equal(sampler[0].weight, trainer[0].weight)


class Cloning(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 3)
        self.register_state_dict_post_hook(self._clone)

    @staticmethod
    def _clone(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[f"{prefix}bias"] = state[f"{prefix}bias"].clone()


def test_copies_are_not_taken_for_the_weights(tmp_path: Path) -> None:
    module = Cloning()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    path = tmp_path / "m.s4w"
    s4weights.save(ones_in(module), path)
    with pytest.raises(s4weights.MismatchError, match=r"`bias` is a copy created .*`strict=False`"):
        s4weights.load_into(module, path)
    with Publisher(tmp_path / "store") as publisher, Subscriber(tmp_path / "store", module) as sub:
        publisher.publish_delta(ones_in(module), 1)
        with pytest.raises(s4weights.MismatchError, match=r"`bias` is a copy created by the module"):
            sub.apply_delta()
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    # Whether the file has it or not, it counts as not filled.
    for state in (ones_in(module), {"weight": torch.full((3, 2), 2.0)}):
        done = s4weights.load_into(module, in_memory(state), strict=False)
        assert done == (["bias"], []) and torch.equal(module.weight, state["weight"])
        assert torch.equal(module.bias, before["bias"])


class Wrapper(torch.Tensor):
    """A tensor without a storage of its own, as a DTensor."""

    _local: torch.Tensor

    @staticmethod
    def __new__(cls, local: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, local.shape, dtype=local.dtype)
        made._local = local
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapper(args[0]._local)
        raise NotImplementedError(func)


class Unusual(torch.nn.Module):
    """Whatever a state dict may show of the memory that a module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = torch.nn.Parameter(torch.zeros(2, 3))
        self.again = self.tied
        self.sharded = torch.nn.Parameter(Wrapper(torch.zeros(4)), requires_grad=False)
        self.register_buffer("scratch", torch.zeros(5), persistent=False)
        self.tables = [torch.zeros(6)]
        self._register_state_dict_hook(self._show)

    @staticmethod
    def _show(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[f"{prefix}turned"] = module.tied.detach().t()
        state[f"{prefix}sharded"] = module.sharded._local
        state[f"{prefix}scratch"] = module.scratch
        state[f"{prefix}table"] = module.tables[0]
        state[f"{prefix}nothing"] = torch.zeros(0)


def test_what_a_module_holds_is_filled_in_whatever_form() -> None:
    holder = torch.nn.Sequential(Unusual())
    module = holder[0]
    tied = torch.ones(2, 3)
    saved = {
        "0.tied": tied,
        "0.again": tied,
        "0.turned": tied.t(),
        "0.sharded": torch.ones(4),
        "0.scratch": torch.ones(5),
        "0.table": torch.ones(6),
        "0.nothing": torch.zeros(0),
    }
    assert s4weights.load_into(holder, in_memory(saved)) == ([], [])
    for tensor in (module.tied, module.sharded._local, module.scratch, module.tables[0]):
        assert tensor.eq(1).all()


def test_scripted_compiled_and_lazy_modules_are_filled() -> None:
    plain = torch.nn.Linear(2, 3)
    saved = in_memory({name: torch.ones_like(value) for name, value in plain.state_dict().items()})
    scripted = torch.jit.script(torch.nn.Linear(2, 3))
    assert s4weights.load_into(scripted, saved) == ([], [])
    assert scripted.weight.eq(1).all() and scripted.bias.eq(1).all()
    compiled = torch.compile(torch.nn.Linear(2, 3))
    assert s4weights.load_into(compiled, in_memory(ones_in(compiled))) == ([], [])
    assert compiled.weight.eq(1).all()
    with pytest.raises(s4weights.MismatchError, match="is not initialized"):
        s4weights.load_into(torch.nn.LazyLinear(3), in_memory(plain.state_dict()))


def nested(end: Any, depth: int = 60) -> Any:
    for _ in range(depth):
        end = [end, end]
    return end


def test_containers_that_occur_many_times_are_passed_once(tmp_path: Path) -> None:
    web: list[Any] = []
    for _ in range(40):
        web.append([*web, web])
    state = {"x": nested("plain"), "web": web, "w": torch.ones(3)}
    path = tmp_path / "x.s4w"
    s4weights.save(state, path)
    start = time.process_time()
    with s4weights.open(path) as f:
        assert list(f) == ["w"]
    state["w"].zero_()
    assert s4weights.load_into(state, path) == ([], [])
    assert state["w"].eq(1).all() and time.process_time() - start < 30


def test_a_tree_is_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, children, betas = [], _names._children, (0.9, 0.99)
    monkeypatch.setattr(_names, "_children", lambda obj: calls.append(1) or children(obj))
    monkeypatch.setattr(_names, "_ways", None)
    w = torch.zeros(1)
    # Neither tied tensors nor what leads to nothing need a second walk.
    tree = {str(i): {"a": torch.zeros(1), "w": w, "betas": betas} for i in range(100)}
    assert len(_names.tensors_by_path(tree)) == 200 and len(calls) == 102


def test_too_many_paths_are_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_names, "MAX_VISITS", 1000)
    path = tmp_path / "x.s4w"
    s4weights.save(nested(torch.ones(2)), path)
    with pytest.raises(s4weights.LimitError, match="1000 paths"):
        s4weights.open(path)
    with pytest.raises(s4weights.LimitError, match="1000 paths"):
        s4weights.load_into({"w": torch.ones(2)}, path)
    # However many there are, tensors that are met once are no problem.
    several = [torch.ones(1) for _ in range(1200)]
    s4weights.save([several, several], path)
    s4weights.save([[t] for t in several], tmp_path / "y.s4w")
    with s4weights.open(tmp_path / "y.s4w") as f:
        assert len(f) == 1200


def test_all_paths_are_found_and_cycles_end() -> None:
    w = torch.zeros(2)
    ring: dict[str, Any] = {"w": w}
    inner = {"up": ring, "w": w}
    ring["inner"] = inner
    paths = [path for path, _ in _names.walk_tensors([ring, inner, 5, w], as_state=True)]
    assert paths == ["0.w", "0.inner.w", "1.up.w", "1.w", "3"]
    deep: Any = w
    for _ in range(20_000):
        deep = [deep]
    assert len(list(_names.walk_tensors(deep, as_state=True))) == 1
