"""A failure on one rank reaches all ranks: none waits for another one forever."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
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
