"""`s4weights.dcp` in one process: targets that share memory, and saves that are still running."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from s4weights import CheckpointStore, CorruptDataError, S4Error

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="PyTorch without distributed")

if dist.is_available():
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from s4weights import dcp as ours
    from s4weights._dcp_metadata import from_json


def loaded(state: dict[str, torch.Tensor], store: Path, plain: Path) -> None:
    """Loads, and compares with what PyTorch's own storage makes of the same targets."""
    expected = {}
    memory: dict[int, torch.Tensor] = {}
    for name, tensor in state.items():
        whole = memory.setdefault(
            tensor.untyped_storage().data_ptr(),
            torch.zeros(tensor.untyped_storage().nbytes(), dtype=torch.uint8).view(tensor.dtype),
        )
        expected[name] = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    ours.load(state, store, 1, no_dist=True)
    dcp.load(expected, checkpoint_id=plain, no_dist=True)
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name


def test_targets_that_share_memory_are_filled_as_by_pytorch(tmp_path: Path) -> None:
    tied = torch.randn(100, 10)
    saved = {"a": tied, "b": tied, "c": torch.randn(100, 10), "d": torch.randn(50, 10)}
    saved["e"] = torch.randn(10, 100)
    ours.save(saved, tmp_path / "store", 1, no_dist=True)
    dcp.save(saved, checkpoint_id=tmp_path / "plain", no_dist=True)
    memory = torch.zeros(150, 10)
    # Tied; overlapping; and one that is not read straight into its memory.
    shapes = {"a": memory[:100], "b": memory[:100], "c": memory[50:], "d": memory[:50]}
    shapes["e"] = memory[:100].t()
    for count in (2, 3):
        for names in itertools.permutations("abcde", count):
            memory.zero_()
            loaded({name: shapes[name] for name in names}, tmp_path / "store", tmp_path / "plain")


def test_a_tied_model_is_loaded(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50, bias=False)
            self.head.weight = self.embed.weight

    model, again = Tied(), Tied()
    ours.save(model.state_dict(), tmp_path, 1, no_dist=True)
    ours.load(again.state_dict(), tmp_path, 1, no_dist=True)
    assert again.head.weight is again.embed.weight
    assert torch.equal(again.embed.weight, model.embed.weight)


def test_closing_a_store_waits_for_all_saves_whichever_fails(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, bandwidth=20 << 20)
    store.save_checkpoint({}, 0)

    def fails(done: int, total: int) -> None:
        if done:
            raise LookupError("a test")

    stager = ours.Stager()
    running: Any = ours.async_save(
        {"w": torch.randn(2 << 20)}, store, 2, stager=stager, no_dist=True
    )
    store.save_checkpoint({"w": torch.ones(9)}, 1, blocking=False, progress=fails)
    with pytest.raises(LookupError, match="a test"):
        store.close()
    assert running.done() and running.exception() is None
    with CheckpointStore(tmp_path) as again:
        assert [entry.step for entry in again.list()] == [0, 2]


def test_whatever_the_first_rank_finds_the_others_hear_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def _entry(self, step: int | None) -> Any:
            raise MemoryError

    told: list[Any] = []
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda found, **_: told.append(found))
    broken: Any = Broken()
    assert ours._newest(broken, None) is None
    assert told == [[None]]


def test_what_is_being_saved_is_the_newest(tmp_path: Path) -> None:
    from s4weights.adapters._common import load_found

    with CheckpointStore(tmp_path, bandwidth=20 << 20) as store:
        assert load_found(store, None) is None
        for step in (1, 2):
            store.save_checkpoint({"w": torch.randn(1 << 20)}, step, blocking=False)
        found = load_found(store, None)
        assert found is not None and found[0] == 2


def test_of_a_publisher_in_memory_nothing_is_left() -> None:
    from s4weights.sync import Publisher

    with Publisher("memory:") as publisher:
        for step in range(3):
            publisher.publish_delta({"w": torch.randn(5000)}, step)
        url = publisher._url
    with CheckpointStore(url) as store:
        assert store.list() == []
        assert store.gc(grace=0, exclusive=True)["deleted"] == []


def cut(nbytes: int) -> torch.Tensor:
    tensor = torch.ones(5000)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


@pytest.mark.parametrize("nbytes", [0, 40])
@pytest.mark.parametrize("shared", [None, False, True])
def test_what_was_freed_is_not_saved(tmp_path: Path, nbytes: int, shared: bool | None) -> None:
    # In a stager's buffer, what follows are other tensors.
    state = {"model": {"gone": cut(nbytes), "others": torch.arange(5000.0)}}
    with pytest.raises((S4Error, CheckpointException), match=r"model\.gone.*was it freed\?"):
        if shared is None:
            ours.save(state, tmp_path, 1, no_dist=True)
        else:
            stager = ours.Stager(shared_memory=shared)
            ours.async_save(state, tmp_path, 1, stager=stager, no_dist=True)
    assert CheckpointStore(tmp_path).list() == []


@pytest.mark.parametrize("nbytes", [0, 40])
def test_what_was_freed_is_not_filled(tmp_path: Path, nbytes: int) -> None:
    ours.save({"w": torch.ones(5000)}, tmp_path, 1, no_dist=True)
    with pytest.raises(CheckpointException, match=r"'w' cannot be filled.*was it freed\?"):
        ours.load({"w": cut(nbytes)}, tmp_path, 1, no_dist=True)


def test_tensors_without_values_are_refused_by_name(tmp_path: Path) -> None:
    with FakeTensorMode():
        fake = torch.empty(3)
    for tensor in (fake, torch.empty(3, device="meta")):
        with pytest.raises(CheckpointException, match="'w': a tensor without values"):
            ours.save({"w": tensor}, tmp_path, 1, no_dist=True)


def test_a_backward_pass_notices_that_a_parameter_was_loaded(tmp_path: Path) -> None:
    ours.save({"w": torch.full((3, 4), 5.0)}, tmp_path, 1, no_dist=True)
    # Decoded in place, and through other memory.
    for weight in (torch.ones(3, 4), torch.ones(4, 3).t()):
        weight.requires_grad_()
        loss = (weight * weight).sum()
        ours.load({"w": weight}, tmp_path, 1, no_dist=True)
        assert torch.equal(weight, torch.full((3, 4), 5.0))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with torch.inference_mode():
        weight = torch.ones(3, 4)
    ours.load({"w": weight}, tmp_path, 1, no_dist=True)
    assert torch.equal(weight, torch.full((3, 4), 5.0))


def test_the_exception_of_a_block_is_not_hidden_by_that_of_a_save(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="mine"), CheckpointStore(tmp_path) as store:
        state = {"w": torch.eye(3).to_sparse()}
        ours.async_save(state, store, 1, stager=ours.Stager(), no_dist=True)
        raise LookupError("mine")


@pytest.mark.parametrize("strides", [[1e400], ["x"], []])
def test_metadata_that_makes_no_sense_is_damage(strides: list[Any]) -> None:
    entry: dict[str, Any] = {"kind": "tensor", "dtype": "float32", "strides": strides}
    entry |= {"requires_grad": False, "memory_format": "contiguous_format", "pin_memory": False}
    entry |= {"size": [2], "chunks": [[[0], [2]]]}
    text = json.dumps({"version": 1, "state": {"w": entry}, "planner": None, "pieces": []})
    if not strides:
        text = "[" * 100_000
    with pytest.raises(CorruptDataError, match="here: invalid distributed metadata"):
        from_json(text.encode(), "here")


def test_a_name_that_is_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"'a\\udc80b': the name cannot be encoded as UTF-8"):
        ours.save({"a\udc80b": torch.ones(3)}, tmp_path, 1, no_dist=True)
