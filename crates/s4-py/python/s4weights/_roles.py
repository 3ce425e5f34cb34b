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
}

#: How deep optimizers are looked for: ``{"trainer": {"optimizers": [...]}}``.
_DEPTH = 4


def find_roles(obj: object, storages: StorageWriter) -> tuple[bytes, str | None]:
    """The group of each storage, and the role table as JSON if there is one."""
    groups = bytearray(len(storages))
    optimizers = list(_optimizers(obj, _DEPTH))
    if not optimizers:
        return bytes(groups), None
    inside = {id(optimizer) for optimizer in optimizers}
    weights: dict[int, tuple[int, ...]] = {}
    for tensor in _tensors(obj, inside):
        number = storages.find(tensor)
        if number is not None:
            weights.setdefault(number, tuple(tensor.shape))
    for optimizer in optimizers:
        for tensor in _tensors(optimizer, set()):
            number = storages.find(tensor)
            if number is not None and number not in weights:
                groups[number] = OPTIMIZER
    table = _Table(storages, list(weights.items()))
    for optimizer in optimizers:
        table.add(optimizer)
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


def _tensors(root: Any, without: set[int]) -> Iterator[Any]:
    """Tensors in containers, in order."""
    import torch

    seen, todo = set(without), [root]
    while todo:
        obj = todo.pop()
        if isinstance(obj, torch.Tensor):
            yield obj
        elif isinstance(obj, (dict, list, tuple)) and id(obj) not in seen:
            seen.add(id(obj))
            items = list(obj.values()) if isinstance(obj, dict) else list(obj)
            todo.extend(reversed(items))


class _Table:
    def __init__(
        self, storages: StorageWriter, weights: list[tuple[int, tuple[int, ...]]]
    ) -> None:
        self._storages = storages
        self._weights = weights
        self._next = 0
        self._parameters = 0
        self._rows: list[dict[str, Any]] = []
        self._groups: list[dict[str, float]] = []

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
        rows = []
        shape: tuple[int, ...] | None = None
        for name, tensor in state.items():
            kind = _KINDS.get(name) if type(name) is str else None
            number = self._storages.find(tensor) if kind else None
            if kind and number is not None:
                rows.append({"tensor": number, "kind": kind})
                shape = tuple(tensor.shape)
        if shape is None:
            return
        for at in range(self._next, len(self._weights)):
            number, found = self._weights[at]
            if found == shape:
                rows.append({"tensor": number, "kind": "weight"})
                self._next = at + 1
                break
        parameter = {"parameter": self._parameters, "group": group}
        self._rows += [{**row, **parameter} for row in rows]
        self._parameters += 1

    def to_json(self) -> str | None:
        if not self._rows:
            return None
        return json.dumps({"tensors": self._rows, "groups": self._groups})


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
