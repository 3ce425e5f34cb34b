"""The stager for `torch.distributed.checkpoint.async_save`."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor

import s4weights
from s4weights.dcp import LoadPlanner, Stager, StorageReader, StorageWriter, async_save
from test_dcp import empty_like, expect_sharded, run_ranks, same, sharded, values

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="PyTorch without distributed")


def address(state: dict[str, Any]) -> int:
    return int(state["w"].untyped_storage().data_ptr())


@pytest.mark.parametrize("shared", [False, True])
def test_what_is_staged_stays_what_it_was(shared: bool) -> None:
    weight = values(1, 300, 200)
    state: dict[str, Any] = {
        "w": weight,
        "tied": weight,
        "column": weight[:, 3],
        "turned": weight.T,
        "half": values(2, 9).to(torch.bfloat16),
        "nothing": torch.empty(0, 4),
        "number": torch.tensor(3.0),
        "conj": torch.tensor([1 + 2j, 3j]).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "parameter": torch.nn.Parameter(values(3, 5)),
        "nested": OrderedDict(a=[values(4, 7), (values(5, 8), {"x": [1, 2]})]),
        "object": {1, 2},
    }
    expected = {name: value.clone() for name, value in state.items() if torch.is_tensor(value)}
    stager = Stager(shared_memory=shared, threads=2)
    staged = stager.stage(state)
    for tensor in (weight, state["half"], state["number"], state["nested"]["a"][0]):
        tensor.add_(1)
    with torch.no_grad():
        state["parameter"].zero_()
    state["nested"]["a"][1][1]["x"].append(3)
    state["object"].add(3)
    for name, tensor in expected.items():
        found = staged[name]
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype), name
        assert found.stride() == state[name].stride() if name != "sparse" else found.is_sparse
        assert torch.equal(found.to_dense(), tensor.to_dense()), name
        assert name == "sparse" or found.is_shared() == shared, name
    assert staged["w"].untyped_storage()._cdata == staged["tied"].untyped_storage()._cdata
    assert staged["w"].data_ptr() == staged["tied"].data_ptr()
    nested = staged["nested"]
    assert type(nested) is OrderedDict and torch.equal(nested["a"][0], values(4, 7))
    assert nested["a"][1][1] == {"x": [1, 2]} and staged["object"] == {1, 2}


class _Pair(NamedTuple):
    doubled: torch.Tensor
    number: int


class _Held:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight


def test_named_tuples_and_objects_hold_copies_of_the_same_tensors() -> None:
    linear = torch.nn.Linear(3, 4)
    weight = linear.weight.detach()
    # The object comes before the other places of the tensor that it holds.
    state = {"object": _Held(weight), "pair": _Pair(linear.weight * 2, 7), "w": [weight, weight]}
    staged = Stager().stage(state)
    assert type(staged["pair"]) is _Pair and staged["pair"].number == 7
    assert torch.equal(staged["pair"].doubled, linear.weight * 2)
    assert staged["object"].weight is staged["w"][0] is staged["w"][1]
    assert staged["w"][0].data_ptr() != weight.data_ptr()


def test_dicts_of_other_types_keep_them() -> None:
    weight = torch.randn(4, 3)
    counts = Counter(a=2)
    state = {
        "weight": weight,
        # A tuple is one value for DCP, which pickles what it holds.
        "seen": (counts, defaultdict(list, b=[weight])),
        "ordered": OrderedDict(z=weight, a=1),
    }
    staged = Stager().stage(state)
    seen, default = staged["seen"]
    assert type(seen) is Counter and seen == counts and seen is not counts
    assert type(default) is defaultdict and default["new"] == []
    assert default["b"][0] is staged["weight"] is staged["ordered"]["z"]
    assert type(staged["ordered"]) is OrderedDict
    weight.zero_()
    assert staged["weight"].abs().sum() > 0


def test_memory_is_used_again_once_a_save_is_over() -> None:
    state = {"w": values(1, 300, 200)}
    stager = Stager()
    first = stager.stage(state)
    second = stager.stage(state)
    places = {address(first), address(second)}
    assert len(places) == 2, "the first save may still read it"
    del first
    state["w"].add_(1)
    third = stager.stage(state)
    assert address(third) in places and torch.equal(third["w"], state["w"])
    assert torch.equal(second["w"], values(1, 300, 200))
    # A state that is larger than the memory that is kept.
    del third
    assert torch.equal(stager.stage({"w": values(2, 999, 333)})["w"], values(2, 999, 333))
    stager.close()
    with pytest.raises(ValueError, match="closed"):
        stager.stage(state)


def _save(rank: int, url: str, kinds: list[str]) -> None:
    for kind in kinds:
        _save_steps(f"{url}-{kind}", kind)


def _save_steps(url: str, kind: str) -> None:
    stager = Stager(shared_memory=kind == "process")
    for step in (1, 2, 3):
        state = sharded(step)
        future = dcp.async_save(
            state,
            storage_writer=StorageWriter(url, step=step),
            async_checkpointer_type=AsyncCheckpointerType(kind),
            async_stager=stager,
        )
        for tensor in _tensors(state):
            tensor.zero_()
        future.result()
    for step in (1, 2, 3):
        loaded = empty_like(sharded(step))
        reader = StorageReader(url, step=step)
        dcp.load(loaded, storage_reader=reader, planner=LoadPlanner())
        expect_sharded(loaded, step)
    stager.close()


def _tensors(obj: Any) -> list[torch.Tensor]:
    if isinstance(obj, DTensor):
        return [obj.to_local()]
    if isinstance(obj, torch.Tensor):
        return [obj]
    children = obj.values() if isinstance(obj, dict) else obj if isinstance(obj, list) else ()
    return [tensor for child in children for tensor in _tensors(child)]


def test_ranks_save_in_the_background_by_thread_and_process(tmp_path: Path) -> None:
    kinds = ["thread", "process"]
    run_ranks(2, _save, str(tmp_path / "run"), kinds)
    for kind in kinds:
        store = s4weights.CheckpointStore(tmp_path / f"run-{kind}")
        assert [e.step for e in store.list()] == [1, 2, 3]
        assert store.verify()["clean"]


def test_errors_are_raised_where_they_belong(tmp_path: Path) -> None:
    stager = Stager()
    good = {"w": values(1, 5000)}

    def save(state: dict[str, Any], url: Path | str, step: int) -> Any:
        writer = StorageWriter(url, step=step)
        return dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True)

    # What cannot be staged is an error of the call, which never returns an already failed future.
    with pytest.raises(TypeError, match="pickle"):
        save({**good, "lock": threading.Lock()}, tmp_path / "run", 1)
    (tmp_path / "file").write_text("no folder")
    failed = save(good, tmp_path / "file" / "run", 1)
    with pytest.raises(CheckpointException) as error:
        failed.result()
    assert isinstance(error.value.failures[0][0], s4weights.StorageError)
    # Neither failure affects the next save, even while somebody holds the failed future.
    save(good, tmp_path / "run", 2).result()
    loaded = {"w": torch.zeros(5000)}
    dcp.load(loaded, storage_reader=StorageReader(tmp_path / "run"), no_dist=True)
    assert same(loaded["w"], good["w"])


def test_a_failed_save_keeps_nothing_once_its_error_was_seen(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with s4weights.CheckpointStore(tmp_path / "file" / "run") as store:
        stager = Stager()
        staged: list[weakref.ref[torch.UntypedStorage]] = []
        stage = stager.stage

        def watched(state: dict[str, Any]) -> dict[str, Any]:
            copy = stage(state)
            staged.append(weakref.ref(copy["object"]))
            return copy

        stager.stage = watched  # type: ignore[method-assign]
        state = {"w": values(1, 5000), "object": Counted()}
        failed = async_save(state, store, 1, stager=stager, no_dist=True)
        with pytest.raises(CheckpointException) as raised:
            failed.result()
        assert store._outside == []
        # PyTorch's worker holds its arguments for a moment after its future has failed.
        for thread in threading.enumerate():
            if thread.name.startswith("AsyncCheckpointExecutor"):
                thread.join(60)
        gc.collect()
        assert staged[0]() is None and raised.value.failures


class Counted:
    """An object that a weak reference can follow."""


def test_attributes_of_tensors_are_kept(tmp_path: Path) -> None:
    class Own(torch.Tensor):
        pass

    shard = torch.arange(4.0)
    shard.global_shape = (8,)  # type: ignore[attr-defined]
    shard.hook = print  # type: ignore[attr-defined]
    own = torch.ones(3).as_subclass(Own)
    staged = Stager().stage({"w": shard, "own": own})
    assert staged["w"].global_shape == (8,) and not hasattr(staged["w"], "hook")
    assert type(staged["own"]) is Own and staged["own"].data_ptr() != own.data_ptr()


def test_objects_may_hold_results_of_a_model() -> None:
    linear = torch.nn.Linear(3, 4)
    staged = Stager().stage({"held": _Held(linear.weight * 2)})
    assert torch.equal(staged["held"].weight, linear.weight * 2)
