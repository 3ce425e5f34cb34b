"""What tensors are to an optimizer, told from the shape of a state dict.

A training checkpoint is usually ``{"model": ..., "optimizer": optimizer.state_dict(), ...}``. Its
tensors are stored in two groups, so that weights can be read without the optimizer's state, and the
file says which moment belongs to which weight. A wrong guess costs some ratio, and nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ._collection import NoCollection

if TYPE_CHECKING:
    from ._storages import StorageWriter

WEIGHTS, OPTIMIZER = 0, 1

#: What optimizers of PyTorch and others call their state.
_KINDS = {
    "exp_avg": "exp_avg",
    "momentum_buffer": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "master": "master",
    "master_param": "master",
    "master_params": "master",
    # Megatron's distributed optimizer, per parameter.
    "param": "master",
    "fp32_param": "master",
}

#: Where frameworks keep the weights in fp32 that a model in 16 bits is rounded from: lists of tensors, in
#: the order of the parameters, as they are or flattened.
_MASTERS = frozenset(
    {
        # apex.fp16_utils, and apex.amp's master parameters
        "fp32_from_fp16",
        "fp32_groups_flat",
        "master_params",
        "master_weights",
        # Megatron-LM
        "fp32_from_fp16_params",
        "fp32_from_float16_params",
        "shard_fp32_from_float16_groups",
        # DeepSpeed
        "fp32_flat_groups",
        "single_partition_of_fp32_groups",
    }
)

#: How deep optimizers are looked for: ``{"trainer": {"optimizers": [...]}}``.
_DEPTH = 4


def find_roles(obj: object, storages: StorageWriter) -> tuple[bytes, str | None]:
    """The group of each storage, and the role table as JSON if there is one."""
    with NoCollection():
        return _find_roles(obj, storages)


def _find_roles(obj: object, storages: StorageWriter) -> tuple[bytes, str | None]:
    groups = bytearray(len(storages))
    optimizers = list(_optimizers(obj, _DEPTH))
    masters = list(_masters(obj, _DEPTH))
    if not optimizers and not masters:
        return bytes(groups), None
    inside = {id(part) for part in (*optimizers, *masters)}
    weights: dict[int, tuple[int, ...]] = {}
    for tensor in _tensors(obj, inside):
        number = storages.find(tensor)
        if number is not None:
            weights.setdefault(number, tuple(tensor.shape))
    for part in (*optimizers, *masters):
        for tensor in _tensors(part, set()):
            number = storages.find(tensor)
            if number is not None and number not in weights:
                groups[number] = OPTIMIZER
    table = _Table(storages, list(weights.items()))
    for optimizer in optimizers:
        table.add(optimizer)
    for tensors in masters:
        table.add_masters(_tensors(tensors, set()))
    return bytes(groups), table.to_json()


def _optimizers(obj: Any, depth: int) -> Iterator[dict[Any, Any]]:
    if isinstance(obj, dict):
        state, groups = obj.get("state"), obj.get("param_groups")
        if isinstance(state, dict) and isinstance(groups, list):
            yield obj
            return
    elif not isinstance(obj, (list, tuple)):
        return
    if depth:
        for item in obj.values() if isinstance(obj, dict) else obj:
            yield from _optimizers(item, depth - 1)


def _masters(obj: Any, depth: int) -> Iterator[Any]:
    """Containers of the weights in fp32 that a model is rounded from."""
    if isinstance(obj, dict):
        for key, item in obj.items():
            if type(key) is str and key in _MASTERS and isinstance(item, (dict, list, tuple)):
                yield item
            elif depth:
                yield from _masters(item, depth - 1)
    elif isinstance(obj, (list, tuple)) and depth:
        for item in obj:
            yield from _masters(item, depth - 1)


def _tensors(root: Any, without: set[int]) -> Iterator[Any]:
    """Tensors in containers, in order."""
    import torch

    # Asking for the type itself is faster, and right for nearly all.
    tensor, parameter = torch.Tensor, torch.nn.Parameter
    seen, todo = set(without), [root]
    while todo:
        obj = todo.pop()
        kind = type(obj)
        if kind is tensor or kind is parameter or isinstance(obj, tensor):
            yield obj
        elif isinstance(obj, (dict, list, tuple)) and id(obj) not in seen:
            seen.add(id(obj))
            items = list(obj.values()) if isinstance(obj, dict) else list(obj)
            todo.extend(reversed(items))


class _Table:
    def __init__(self, storages: StorageWriter, weights: list[tuple[int, tuple[int, ...]]]) -> None:
        self._storages = storages
        self._weights = weights
        self._next = 0
        self._parameters = 0
        # Of each tensor its number, its kind, the parameter and the group.
        self._rows: list[tuple[int, str, int, int]] = []
        self._groups: list[dict[str, float]] = []
        # The parameter and group of each weight that has one.
        self._known: dict[int, tuple[int, int]] = {}
        self._next_master = 0

    def add(self, optimizer: dict[Any, Any]) -> None:
        """Parameters are in the model's order, as in `torch.optim`."""
        for group in optimizer["param_groups"]:
            if not isinstance(group, dict) or not isinstance(group.get("params"), list):
                continue
            number = len(self._groups)
            self._groups.append(_scalars(group))
            for key in group["params"]:
                state = optimizer["state"].get(key) if type(key) in (int, str) else None
                if isinstance(state, dict):
                    self._add_parameter(state, number)

    def _add_parameter(self, state: dict[Any, Any], group: int) -> None:
        parameter = (self._parameters, group)
        last = None
        for name, tensor in state.items():
            kind = _KINDS.get(name) if type(name) is str else None
            number = self._storages.find(tensor) if kind else None
            if kind and number is not None:
                self._rows.append((number, kind, *parameter))
                last = tensor
        if last is None:
            return
        at = self._find(self._next, tuple(last.shape))
        if at is not None:
            weight = self._weights[at][0]
            self._rows.append((weight, "weight", *parameter))
            self._known[weight] = parameter
            self._next = at + 1
        self._parameters += 1

    def _find(self, first: int, shape: tuple[int, ...]) -> int | None:
        """The next weight of a shape, from one on; without one, the next of as many values: an
        optimizer's tensors may be flattened.
        """
        later = range(first, len(self._weights))
        alike = (at for at in later if self._weights[at][1] == shape)
        numel = math.prod(shape)
        flat = (at for at in later if math.prod(self._weights[at][1]) == numel)
        return next(alike, next(flat, None))

    def add_masters(self, tensors: Iterator[Any]) -> None:
        """Weights in fp32 that a model's are rounded from, in the order of the parameters."""
        for tensor in tensors:
            number = self._storages.find(tensor)
            at = self._find(self._next_master, tuple(tensor.shape))
            if number is None or at is None:
                continue
            weight = self._weights[at][0]
            self._next_master = at + 1
            if number == weight:
                continue
            parameter = self._known.get(weight)
            if parameter is None:
                parameter = self._known[weight] = (self._parameters, 0)
                self._parameters += 1
                self._rows.append((weight, "weight", *parameter))
            self._rows.append((number, "master", *parameter))
        if not self._groups:
            self._groups.append({})

    def to_json(self) -> str | None:
        if not self._rows:
            return None
        # Written out: thousands of dicts take longer to make, and to write, than all else here.
        rows = ",".join(
            f'{{"tensor":{number},"kind":"{kind}","parameter":{parameter},"group":{group}}}'
            for number, kind, parameter, group in self._rows
        )
        return f'{{"tensors":[{rows}],"groups":{json.dumps(self._groups)}}}'


def _scalars(group: dict[Any, Any]) -> dict[str, float]:
    """Numbers of a parameter group (lr, betas, eps...) that JSON can hold."""
    out: dict[str, float] = {}
    for name, value in group.items():
        if type(name) is not str or name == "params":
            continue
        parts = enumerate(value) if isinstance(value, (tuple, list)) else [("", value)]
        for i, part in parts:
            if type(part) in (int, float) and abs(part) < 1e300 and math.isfinite(part):
                out[f"{name}{i}"] = float(part)
    return out
