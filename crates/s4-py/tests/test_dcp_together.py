"""A failure on one rank reaches all ranks: none waits for another one forever."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.api import CheckpointException

import s4weights
from s4weights import dcp
from test_dcp import PATIENCE, expect_sharded, run_ranks, sharded

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="PyTorch without distributed")


class Case(NamedTuple):
    """The expected failure: rank ``at`` raises ``kind``, the others DCP's exception with that text."""

    kind: type[BaseException]
    text: str
    at: int = 1


def expect_failure(rank: int, case: Case, call: Any) -> None:
    begun = time.monotonic()
    with pytest.raises(case.kind if rank == case.at else CheckpointException, match=case.text):
        call()
    assert time.monotonic() - begun < PATIENCE / 2
    # The ranks still agree on what they exchange.
    ranks: list[Any] = [None, None]
    dist.all_gather_object(ranks, rank)
    assert ranks == [0, 1]


def freed() -> torch.Tensor:
    tensor = torch.ones(9)
    tensor.untyped_storage().resize_(0)
    return tensor


class Stop(Exception):
    """Another process cannot make it from what a pickle of an exception holds."""

    def __init__(self, done: int, total: int) -> None:
        super().__init__(f"stopped at {done} of {total}")


def stop(done: int, total: int) -> None:
    raise Stop(done, total)


def slow(done: int, total: int) -> None:
    time.sleep(0.5)


class Broken(torch.nn.Module):
    """A `Stateful` whose state cannot be had, or not be loaded, on some ranks."""

    def __init__(self, fails: str | None) -> None:
        super().__init__()
        self.fails = fails
        self.w = torch.nn.Parameter(torch.ones(9))

    def state_dict(self, *args: Any, **options: Any) -> Any:
        if self.fails == "save":
            raise Stop(1, 2)
        return super().state_dict(*args, **options)

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        if self.fails == "load":
            raise Stop(3, 4)
        return super().load_state_dict(*args, **options)


def _fail_stateful(rank: int, url: str) -> None:
    case = Case(Stop, "stopped at 1 of 2")
    module = Broken("save" if rank == case.at else None)
    stager = dcp.Stager()
    expect_failure(rank, case, lambda: dcp.save({"model": module}, url, 1))
    expect_failure(rank, case, lambda: dcp.async_save({"model": module}, url, 1, stager=stager).result())
    # What is no state at all.
    wrong: Any = [1] if rank == case.at else {"w": torch.ones(9)}
    expect_failure(rank, Case(AttributeError, "items"), lambda: dcp.save(wrong, url, 1))
    assert not s4weights.CheckpointStore(url).list()
    module.fails = None
    dcp.save({"model": module}, url, 2)
    with torch.no_grad():
        module.w.zero_()
    module.fails = "save" if rank == case.at else None
    for step in (2, None):
        expect_failure(rank, case, lambda: dcp.load({"model": module}, url, step))  # noqa: B023
    assert not module.w.any()
    # After the exchange each rank is on its own.
    module.fails = "load" if rank == case.at else None
    if rank == case.at:
        with pytest.raises(Stop, match="stopped at 3 of 4"):
            dcp.load({"model": module}, url)
    else:
        dcp.load({"model": module}, url)
    assert bool(module.w.all())
    ranks: list[Any] = [None, None]
    dist.all_gather_object(ranks, rank)
    assert ranks == [0, 1]


def _fail_stateful_after_keys(rank: int, url: str) -> None:
    """As DCP's `load` was before: the ranks exchange keys, and then call `state_dict`."""
    from s4weights import _dcp_together

    case = Case(Stop, "stopped at 1 of 2")
    module = Broken(None)
    dcp.save({"model": module}, url, 1)
    load = torch_dcp.load

    def load_after_keys(state: Any, **options: Any) -> None:
        dist.all_gather_object([None, None], [*state.keys()])
        load(state, **options)

    torch_dcp.load = load_after_keys
    _dcp_together._EXCHANGES_KEYS = True
    module.fails = "save" if rank == case.at else None
    for step in (1, None):
        expect_failure(rank, case, lambda: dcp.load({"model": module}, url, step))  # noqa: B023
    wrong: Any = [1] if rank == case.at else {"model": Broken(None)}
    expect_failure(rank, Case(AttributeError, "keys"), lambda: dcp.load(wrong, url, 1))
    module.fails = None
    dcp.load({"model": module}, url)


def _refuse_beside_pytorch(rank: int, folder: str) -> None:
    # Made here, as that takes exchanges, too. With our writer, and with PyTorch's, whose exchanges are the same.
    target = sharded(1)
    writer = dcp.StorageWriter(f"{folder}/store", step=1, progress=slow)
    ours = torch_dcp.async_save(sharded(2), storage_writer=writer, async_stager=dcp.Stager())
    for running in (ours, None):
        if running is None:
            slow_writer = SlowWriter(f"{folder}/plain")
            running = torch_dcp.async_save(target, storage_writer=slow_writer)
        # On all ranks, so nobody may be told before the save has ended.
        with pytest.raises(ValueError, match="threads=0"):
            dcp.load(target, f"{folder}/store", threads=0)
        assert running.done()
        running.result()
    state = sharded(3)
    dcp.load(state, f"{folder}/store")
    expect_sharded(state, 2)


class SlowWriter(torch_dcp.FileSystemWriter):  # type: ignore[misc]
    def write_data(self, *args: Any) -> Any:
        time.sleep(1)
        return super().write_data(*args)


def _refuse_meanwhile(rank: int, url: str) -> None:
    stager = dcp.Stager()
    running = dcp.async_save(sharded(2), url, 1, stager=stager, progress=slow)
    # On all ranks.
    with pytest.raises(ValueError, match="not finite"):
        dcp.async_save({"w": torch.ones(3)}, url, 2, stager=stager, metrics={"loss": float("nan")})
    running.result()
    with pytest.raises(ValueError, match="threads=0"):
        dcp.load(sharded(1), url, threads=0)
    state = sharded(3)
    dcp.load(state, url)
    expect_sharded(state, 2)


def _fail(rank: int, url: str) -> None:
    case = Case(ValueError, "not finite", at=0)
    metrics = {"loss": float("nan") if rank == case.at else 1.0}
    expect_failure(rank, case, lambda: dcp.save(sharded(1), url, 1, metrics=metrics))
    stager = dcp.Stager()

    def save_later(state: dict[str, Any], **options: Any) -> None:
        dcp.async_save(state, url, 1, stager=stager, **options).result()

    expect_failure(rank, case, lambda: save_later(sharded(1), metrics=metrics))
    state = sharded(1)
    if rank == 1:
        state["model"]["plain"] = freed()
    case = Case(s4weights.S4Error, "`model.plain`: its storage is too small; was it freed?")
    expect_failure(rank, case, lambda: save_later(state))
    case = Case(CheckpointException, "Stop: stopped at")
    expect_failure(rank, case, lambda: dcp.save(sharded(1), url, 1, progress=stop))
    save_later(sharded(2))
    options = {"threads": 0} if rank == 1 else {}
    case = Case(ValueError, "threads=0")
    for step in (1, None):
        state = sharded(3)
        expect_failure(rank, case, lambda: dcp.load(state, url, step, **options))  # noqa: B023
    dcp.load(state, url)
    expect_sharded(state, 2)


def test_what_one_rank_fails_at_fails_on_all(tmp_path: Path) -> None:
    run_ranks(2, _fail, str(tmp_path))


def test_a_call_that_is_refused_meanwhile_leaves_a_running_save_alone(tmp_path: Path) -> None:
    run_ranks(2, _refuse_meanwhile, str(tmp_path / "store"))


def test_a_state_that_one_rank_cannot_give_fails_on_all(tmp_path: Path) -> None:
    run_ranks(2, _fail_stateful, str(tmp_path / "store"))


def test_a_state_that_one_rank_cannot_give_fails_on_all_after_an_exchange_of_keys(tmp_path: Path) -> None:
    run_ranks(2, _fail_stateful_after_keys, str(tmp_path / "store"))


def test_saves_of_pytorchs_own_async_save_are_left_alone(tmp_path: Path) -> None:
    run_ranks(2, _refuse_beside_pytorch, str(tmp_path))
