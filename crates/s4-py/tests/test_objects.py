"""Objects come back as they do from `torch.save` and `torch.load`."""

from __future__ import annotations

import enum
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import s4weights
from compare import assert_identical, through_s4, through_torch


class Color(enum.Enum):
    RED = 1
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 3


Point = namedtuple("Point", ["x", "y"])


@dataclass
class Config:
    width: int = 3
    names: list[str] = field(default_factory=list)
    weight: torch.Tensor | None = None


class Slotted:
    __slots__ = ("weight",)

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __getstate__(self) -> Any:
        return None, {"weight": self.weight}


class Tagged(torch.Tensor):
    pass


def nan_with_payload() -> float:
    import struct

    return struct.unpack(">d", bytes.fromhex("7ff800000000beef"))[0]


PLAIN: dict[str, Any] = {
    "none": None,
    "scalars": [
        True,
        False,
        0,
        1,
        -1,
        1.0,
        -0.0,
        0.1,
        1e300,
        5e-324,
        "",
        "text",
        "\0\n\U0001f600é",
    ],
    "large integers": [2**53 - 1, 2**53, -(2**53), 2**63, 2**64, -(2**200), 10**5000],
    "special floats": [float("inf"), float("-inf"), float("nan"), nan_with_payload()],
    "complex": [1 + 2j, complex(float("nan"), -0.0), complex(0.0, float("-inf"))],
    "bytes": [b"", b"\0\xff" * 300, bytearray(b"abc")],
    "containers": {"list": [1, [2, []]], "tuple": (1, (), ("a",)), "set": {1, 2}, "empty": {}},
    "frozen sets": frozenset({1, "a", (2, 3)}),
    "keys": {
        10**5000: "h",
        1: "a",
        "1": "b",
        2.5: "c",
        None: "d",
        (1, ("x", None)): "e",
        False: "f",
        "": "g",
    },
    "order": {str(i): i for i in (3, 1, 2)},
    "dtypes": [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint4],
    "devices": [torch.device("cpu"), torch.device("cuda:1"), torch.device("meta")],
    "sizes": [torch.Size([]), torch.Size([2, 0, 3]), torch.zeros(2, 3).shape],
    "ordered": OrderedDict([("b", 1), ("a", OrderedDict())]),
    "python random state": random.Random(3).getstate(),
    "numpy generator": np.random.default_rng(3).bit_generator.state,
    "torch random state": torch.Generator().manual_seed(7).get_state(),
}

PICKLED: dict[str, Any] = {
    "named tuple": Point(torch.arange(3), {"y": 1}),
    "enum": {"color": Color.RED, "level": Level.LOW, Color.BLUE: 1},
    "dataclass": Config(names=["a"], weight=torch.ones(2)),
    "default dict": defaultdict(list, {"a": [1]}),
    "counter": Counter("hello"),
    "deque": deque([1, torch.zeros(1)], maxlen=4),
    "numpy": {
        "array": np.arange(12.0).reshape(3, 4),
        "scalar": np.float64(0.1),
        "int": np.int64(3),
    },
    "numpy random state": np.random.RandomState(3).get_state(),
    "surrogates": ["\ud800"],
    "range and slice": [range(3), slice(1, 2)],
    "path": Path("a/b"),
    "deep": None,
    "class": [Config, OrderedDict],
    "bool and int subclasses": {"a": Level.LOW},
}
for _ in range(60):
    PICKLED["deep"] = {"deeper": PICKLED["deep"]}


def form_of(path: Path) -> str:
    return s4weights.inspect(path)["form"]


@pytest.mark.parametrize("name", PLAIN)
def test_plain_objects_are_stored_as_a_tree(name: str, path: Path) -> None:
    obj = {"it": PLAIN[name]}
    assert_identical(through_torch(obj), through_s4(obj, path))
    assert_identical(obj, s4weights.load(path))
    assert form_of(path) == "tree"


@pytest.mark.parametrize("name", PICKLED)
def test_other_objects_are_stored_as_a_pickle(name: str, path: Path) -> None:
    obj = {"it": PICKLED[name]}
    assert_identical(through_torch(obj), through_s4(obj, path))
    assert form_of(path) == "pickle"


def test_slots_outside_of_containers(path: Path) -> None:
    loaded = through_s4(Slotted(torch.arange(3)), path)
    assert loaded.weight.tolist() == [0, 1, 2]
    assert s4weights.inspect(path)["tensors"][0]["name"] == "weight"


def test_shared_containers_and_cycles_stay_shared(path: Path) -> None:
    shared = [1, torch.zeros(2)]
    cycle: dict[str, Any] = {"a": shared, "b": (shared, {"c": shared})}
    cycle["self"] = cycle
    loaded = through_s4(cycle, path)
    assert_identical(through_torch(cycle), loaded)
    assert loaded["self"] is loaded and loaded["b"][0] is loaded["a"]


def test_one_tensor_under_two_keys_is_one_tensor(path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(3))
    obj = {"a": weight, "b": [weight, weight.detach()]}
    loaded = through_s4(obj, path)
    assert_identical(through_torch(obj), loaded)
    assert loaded["a"] is loaded["b"][0] and form_of(path) == "tree"


def test_attributes_of_state_dicts_survive(path: Path) -> None:
    state = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).state_dict()
    loaded = through_s4(state, path)
    assert_identical(through_torch(state), loaded)
    assert loaded._metadata["1"] == {"version": 2} and form_of(path) == "tree"


def test_modules_and_their_names(path: Path) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    loaded = through_s4({"model": model}, path)["model"]
    assert_identical(model.state_dict(), loaded.state_dict())
    names = {tensor["name"] for tensor in s4weights.inspect(path)["tensors"]}
    assert {"model.0.weight", "model.1.running_mean"} <= names


def test_tensor_subclasses_and_attributes(path: Path) -> None:
    plain = torch.arange(3.0)
    plain.note = "kept"  # type: ignore[attr-defined]
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.sharded = True  # type: ignore[attr-defined]
    obj = [plain, parameter, torch.ones(2).as_subclass(Tagged), torch.nn.Buffer(torch.ones(1))]
    loaded = through_s4(obj, path)
    assert_identical(through_torch(obj), loaded)
    assert loaded[0].note == "kept" and type(loaded[2]) is Tagged


def test_frozen_and_unfrozen_parameters(path: Path) -> None:
    frozen = torch.nn.Parameter(torch.arange(3), requires_grad=False)
    computed = torch.nn.Parameter(torch.ones(2)) * 2
    obj = [torch.nn.Parameter(torch.ones(2)), frozen, torch.ones(1, requires_grad=True), computed]
    loaded = through_s4(obj, path)
    assert_identical(through_torch(obj), loaded)
    assert [t.requires_grad for t in loaded] == [True, False, True, True] and loaded[3].is_leaf


def test_a_tensor_by_itself(path: Path) -> None:
    assert_identical(torch.arange(3), through_s4(torch.arange(3), path))
    assert [t["name"] for t in s4weights.inspect(path)["tensors"]] == ["tensor"]


def test_storages_by_themselves(path: Path) -> None:
    obj = [torch.arange(6.0).untyped_storage(), torch.ones(2, dtype=torch.int16)._typed_storage()]
    assert_identical(through_torch(obj), through_s4(obj, path))


def test_a_storage_of_two_dtypes(path: Path) -> None:
    tensor = torch.arange(6.0)
    obj = {"floats": tensor, "ints": tensor.view(torch.int16)[2:5], "pickled": Color.RED}
    with pytest.raises(RuntimeError, match="different types"):
        through_torch(obj)
    assert_identical(obj, through_s4(obj, path))
    assert_identical([tensor, obj["ints"]], through_s4([tensor, obj["ints"]], path))


def test_names_are_unique_and_fit_the_format(path: Path) -> None:
    obj = {
        "a.b": torch.ones(1),
        "a": {"b": torch.zeros(1)},
        "": torch.ones(2),
        "x\0y": torch.ones(3),
    }
    obj["é" * 5000] = torch.ones(4)
    obj["\ud800"] = torch.ones(5)
    assert_identical(through_torch(obj), through_s4(obj, path))
    names = [tensor["name"] for tensor in s4weights.inspect(path)["tensors"]]
    assert len(set(names)) == 6 and {"a.b", "a.b~2"} <= set(names)
    assert all(0 < len(name.encode()) <= 4096 and "\0" not in name for name in names)


class Hidden:
    """Holds a tensor where only pickling finds it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._get = lambda: tensor

    def __call__(self) -> torch.Tensor:
        return self._get()

    def __reduce__(self) -> Any:
        return Hidden, (self._get(),)


class Loud:
    """A key that must not be asked for its name."""

    def __repr__(self) -> str:
        raise AssertionError

    __str__ = __repr__


def test_keys_are_not_asked_for_their_names(path: Path) -> None:
    s4weights.save({Loud(): torch.ones(1), Color.RED: torch.ones(2), (1, "a"): torch.ones(3)}, path)
    names = [tensor["name"] for tensor in s4weights.inspect(path)["tensors"]]
    assert names == ["Loud", "Color", "(1, a)"]


def test_ten_thousand_tensors_that_names_do_not_reach(path: Path) -> None:
    obj = [Hidden(torch.tensor(i)) for i in range(10_000)]
    loaded = through_s4(obj, path)
    assert all(item().item() == i for i, item in enumerate(loaded))
    names = [tensor["name"] for tensor in s4weights.inspect(path)["tensors"]]
    assert names[:2] == ["storage", "storage~2"] and len(set(names)) == 10_000


def test_large_plain_objects(path: Path) -> None:
    obj = {"many": list(range(300_000)), "long": b"\1" * (3 << 20), "text": "x" * (1 << 20)}
    assert_identical(obj, through_s4(obj, path, weights_only=True))


def test_a_tuple_that_doubles_does_not_explode(path: Path) -> None:
    bomb: Any = ()
    for _ in range(30):
        bomb = (bomb, bomb)
    loaded = through_s4(bomb, path)
    depth = 0
    while loaded:
        loaded, depth = loaded[0], depth + 1
    assert depth == 30


def test_names_keep_their_end(path: Path) -> None:
    deep: Any = {"weight\0é": torch.ones(3)}
    for _ in range(20):
        deep = {"é" * 1000: deep}
    s4weights.save(deep, path)
    (name,) = (tensor["name"] for tensor in s4weights.inspect(path)["tensors"])
    assert name.endswith("é.weight\\0é") and 4000 < len(name.encode()) <= 4096
    assert_identical(deep, s4weights.load(path))


def test_a_dict_that_changes_while_it_is_walked(path: Path) -> None:
    class Array:
        """Lends memory, and changes the dict that it is in."""

        def __init__(self, into: dict[str, Any], tensor: torch.Tensor) -> None:
            self.into, self.tensor = into, tensor

        def __dlpack__(self, **arguments: Any) -> Any:
            self.into[f"new{len(self.into)}"] = 1
            self.into.pop("gone", None)
            return self.tensor.__dlpack__(**arguments)

        def __dlpack_device__(self) -> Any:
            return self.tensor.__dlpack_device__()

    obj: dict[str, Any] = {}
    obj |= {"a": Array(obj, torch.arange(4.0)), "gone": [1, 2], "b": torch.ones(2)}
    s4weights.save(obj, path)
    loaded = s4weights.load(path)
    assert loaded["gone"] == [1, 2] and list(loaded) == ["a", "gone", "b"]
    assert_identical(torch.arange(4.0), loaded["a"])


def test_sizes_that_are_arguments_of_a_reshape(path: Path) -> None:
    obj = {"shape": torch.Size([-1, 3]), "w": torch.ones(2)}
    assert_identical(through_s4(obj, path), obj)


class Attributes(dict):
    """A dict whose keys are attributes, too: a key "values" hides the method."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.__dict__ = self

    def __reduce__(self) -> Any:
        return Attributes, (dict(self),)


class Refusing(dict):
    """A dict that nobody may look into."""

    def items(self) -> Any:
        raise KeyError("locked")

    values = items

    def __reduce__(self) -> Any:
        return Refusing, (list(zip(self, map(self.__getitem__, self), strict=True)),)


@pytest.mark.parametrize("kind", [Attributes, Refusing])
def test_looking_for_names_and_roles_fails_no_save(kind: Any, path: Path) -> None:
    w = torch.ones(4)
    state = {0: kind({"exp_avg": w + 1, "values": 1, "items": 2})}
    optimizer = {"state": kind(state), "param_groups": [{"lr": 0.1, "params": [0]}]}
    obj = kind({"values": w, "items": {"x": w}, "optimizer": optimizer})
    found = through_s4(obj, path)
    assert type(found) is kind and torch.equal(found["values"], w)
    assert type(found["optimizer"]["state"][0]) is kind
    assert torch.equal(found["optimizer"]["state"][0]["exp_avg"], w + 1)


class Dropping:
    """Pickled without the tensor that it has freed."""

    def __init__(self, freed: torch.Tensor) -> None:
        self.kept, self.freed = torch.ones(3), freed

    def __getstate__(self) -> Any:
        return {"kept": self.kept}


def test_freed_tensors_matter_only_if_they_are_pickled(path: Path) -> None:
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    found = through_s4(Dropping(freed), path)
    assert torch.equal(found.kept, torch.ones(3)) and not hasattr(found, "freed")
    with pytest.raises(s4weights.S4Error, match=r"cannot save `0.freed`: .*was it freed"):
        through_s4([Dropping(freed), freed], path)
    with pytest.raises(s4weights.S4Error, match=r"cannot save `x`: .*was it freed"):
        through_s4({"x": freed, "y": Dropping(freed)}, path)
