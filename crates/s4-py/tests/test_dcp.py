"""`torch.distributed.checkpoint` over gloo ranks, into a store."""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import s4weights
from in_time import free_port
from s4weights.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="PyTorch without distributed")

#: Seconds after which ranks that wait for another one give up.
PATIENCE = 300


def run_ranks(world: int, work: Callable[..., None], *args: Any) -> None:
    """Runs ``work(rank, *args)`` in ``world`` processes; any failure fails the test."""
    mp.spawn(_rank, (world, free_port(), work, args), nprocs=world)


def _rank(rank: int, world: int, port: int, work: Callable[..., None], args: Any) -> None:
    import datetime

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=patience)
    try:
        work(rank, *args)
    finally:
        dist.destroy_process_group()
    for child in mp.active_children():
        child.terminate()
        child.join()
    # gloo's threads may still drop the tensors of the last collective. If one does so while the
    # interpreter shuts down, the process aborts (pytorch#190489), so shutdown is skipped.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def values(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values like weights, the same on every rank."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02
    return made.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


def sharded(step: int) -> dict[str, Any]:
    """A state that is sharded in every way, with the values of a step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    world = dist.get_world_size()
    return {
        "model": {
            "rows": distribute_tensor(values(step, 50, 300), mesh, [Shard(0)]),
            "cols": distribute_tensor(
                values(step + 1, 33, 513, dtype=torch.bfloat16), mesh, [Shard(1)]
            ),
            "few": distribute_tensor(values(step + 2, 2, 5000), mesh, [Shard(0)]),
            "all": distribute_tensor(values(step + 3, 129), mesh, [Replicate()]),
            "plain": values(step + 4, 77, 91),
            "scalar": torch.tensor(float(step)),
            "none": torch.empty(0, 7),
        },
        "step": step,
        "words": {"a": [step, "x"], "world": world},
    }


def empty_like(state: dict[str, Any]) -> dict[str, Any]:
    def empty(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: empty(inner) for name, inner in value.items()}
        if isinstance(value, torch.Tensor):
            return torch.full_like(value, -1.0)
        return None

    return {name: empty(value) for name, value in state.items()}


def expect_sharded(loaded: dict[str, Any], step: int) -> None:
    wanted = {
        "rows": values(step, 50, 300),
        "cols": values(step + 1, 33, 513, dtype=torch.bfloat16),
        "few": values(step + 2, 2, 5000),
        "all": values(step + 3, 129),
        "plain": values(step + 4, 77, 91),
        "scalar": torch.tensor(float(step)),
        "none": torch.empty(0, 7),
    }
    for name, want in wanted.items():
        got = loaded["model"][name]
        got = got.full_tensor() if isinstance(got, DTensor) else got
        assert got.dtype == want.dtype and same(got, want), name
    assert loaded["step"] == step and loaded["words"]["a"] == [step, "x"]


def _save_steps(rank: int, url: str, steps: list[int]) -> None:
    for step in steps:
        writer = StorageWriter(url, step=step, metrics={"loss": 1.0 / step}, tags={"by": "test"})
        metadata = dcp.save(sharded(step), storage_writer=writer)
        assert isinstance(pickle.loads(pickle.dumps(metadata)), type(metadata))
        assert (writer.entry is not None) == (rank == 0)


def _load_steps(rank: int, url: str, steps: list[int]) -> None:
    for step in steps:
        state = empty_like(sharded(0))
        dcp.load(state, storage_reader=StorageReader(url, step=step), planner=LoadPlanner())
        expect_sharded(state, step)


def test_ranks_store_one_checkpoint_and_others_load_it(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    run_ranks(2, _save_steps, url, [10, 20])
    run_ranks(4, _load_steps, url, [10, 20])
    run_ranks(1, _load_steps, url, [20])
    run_ranks(3, _load_steps, url, [10])

    # For everything else it is a checkpoint like any other.
    store = s4weights.CheckpointStore(url)
    entries = store.list()
    assert [entry.step for entry in entries] == [10, 20]
    assert entries[0].metrics == {"loss": 0.1} and entries[0].tags == {"by": "test"}
    assert store.verify()["clean"]
    loaded = store.load_checkpoint(20)
    assert same(loaded["model.plain"], values(24, 77, 91))
    assert same(loaded["model.rows@0,0"], values(20, 50, 300)[:25])
    store.delete(10)
    store.gc(grace=0.0, exclusive=True)
    assert store.verify()["clean"] and [entry.step for entry in store.list()] == [20]
    run_ranks(2, _load_steps, url, [20])


def _train(rank: int, url: str, mesh_shape: tuple[int, ...]) -> None:
    """Trains and saves some steps, then loads the last one into another model, bit for bit."""
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)

    def build(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 500), torch.nn.GELU(), torch.nn.Linear(500, 64)
        )
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    def flat(model: torch.nn.Module, optim: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        model_state, optim_state = get_state_dict(model, optim)
        found = {f"m.{k}": v for k, v in model_state.items()}
        for name, state in optim_state["state"].items():
            found.update({f"o.{name}.{k}": v for k, v in state.items()})
        return {k: v.to_local() if isinstance(v, DTensor) else v for k, v in found.items()}

    model, optim = build(1)
    sizes = []
    for step in range(1, 4):
        model(torch.randn(8, 64)).square().mean().backward()
        optim.step()
        optim.zero_grad()
        model_state, optim_state = get_state_dict(model, optim)
        writer = StorageWriter(url)
        state = {"model": model_state, "optim": optim_state}
        dcp.save(state, checkpoint_id=f"{url}/step-{step}", storage_writer=writer)
        if rank == 0:
            assert writer.entry is not None
            sizes.append((writer.entry.kind, writer.entry.bytes))
    if rank == 0:
        assert [kind for kind, _ in sizes] == ["base", "delta", "delta"], sizes
        assert sizes[1][1] < sizes[0][1], sizes
    other, other_optim = build(2)
    model_state, optim_state = get_state_dict(other, other_optim)
    state = {"model": model_state, "optim": optim_state}
    dcp.load(state, storage_reader=StorageReader(url), planner=LoadPlanner())
    set_state_dict(
        other, other_optim, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    want, got = flat(model, optim), flat(other, other_optim)
    assert want.keys() == got.keys() and len(want) > 10
    for name, tensor in want.items():
        assert same(tensor, got[name]), name


@pytest.mark.parametrize(("world", "mesh"), [(2, (2,)), (4, (2, 2))])
def test_fsdp_trains_saves_and_resumes(tmp_path: Path, world: int, mesh: tuple[int, ...]) -> None:
    run_ranks(world, _train, str(tmp_path / "run"), mesh)


def _save_tied(rank: int, url: str) -> None:
    weight = values(1, 500, 100)
    state = {"embed": weight, "head": weight, "other": weight.clone()}
    dcp.save(state, storage_writer=StorageWriter(url, step=1))
    loaded = {name: torch.zeros_like(weight) for name in state}
    dcp.load(loaded, storage_reader=StorageReader(url))
    assert all(same(tensor, weight) for tensor in loaded.values())
    if rank == 0:
        names = s4weights.CheckpointStore(url).load_checkpoint(1).keys()
        assert sorted(names) in (["embed", "other"], ["head", "other"])


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    run_ranks(1, _save_tied, str(tmp_path / "run"))


class Bad:
    """An object whose code an unsafe planner would run."""

    ran = False

    def __reduce__(self) -> Any:
        return (setattr, (Bad, "ran", True))


def _code(rank: int, url: str) -> None:
    dcp.save({"w": values(1, 5000), "x": Bad()}, storage_writer=StorageWriter(url, step=1))
    state = {"w": torch.zeros(5000), "x": 0}
    with pytest.raises(CheckpointException) as failed:
        dcp.load(state, storage_reader=StorageReader(url), planner=LoadPlanner())
    assert "Weights only load failed" in str(failed.value)
    assert not Bad.ran


def test_the_safe_planner_runs_no_code(tmp_path: Path) -> None:
    run_ranks(1, _code, str(tmp_path / "run"))


class Failing(StorageWriter):
    """Fails on rank 1."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1:
            raise s4weights.StorageError(28, "no space left", "there")
        return super().write_data(plan, planner)


def _fail(rank: int, url: str) -> None:
    dcp.save(sharded(1), storage_writer=StorageWriter(url, step=1))
    with pytest.raises(CheckpointException) as failed:
        dcp.save(sharded(2), storage_writer=Failing(url, step=2))
    errors = failed.value.failures
    assert list(errors) == [1] and "no space left" in str(failed.value)
    dcp.save(sharded(3), storage_writer=StorageWriter(url, step=3))
    _load_steps(rank, url, [1, 3])


def test_a_failure_of_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    run_ranks(2, _fail, url)
    store = s4weights.CheckpointStore(url)
    assert [entry.step for entry in store.list()] == [1, 3]
    assert store.verify()["clean"]
    # The leftovers of the failed save are given up by one sweep and deleted by the next.
    assert len(store.gc(grace=0.0, exclusive=True)["given_up"]) == 1
    assert store.gc(grace=0.0, exclusive=True)["deleted_bytes"] > 0
    assert [entry.step for entry in store.list()] == [1, 3] and store.verify()["clean"]


class Dying(StorageWriter):
    """Rank 1 is killed while it writes, after its objects are stored."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        done = super().write_data(plan, planner)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return done


def _die(rank: int, url: str, told: str) -> None:
    dcp.save(sharded(1), storage_writer=StorageWriter(url, step=1))
    started = time.monotonic()
    try:
        dcp.save(sharded(2), storage_writer=Dying(url, step=2))
    except BaseException as error:
        # At once: the other ranks are ended as soon as one was killed.
        Path(f"{told}.new").write_text(f"{time.monotonic() - started} {type(error).__name__}")
        os.replace(f"{told}.new", told)
        raise


def test_a_killed_rank_leaves_nothing_visible(tmp_path: Path) -> None:
    url, told = str(tmp_path / "run"), tmp_path / "told"
    with pytest.raises(Exception, match=r"SIGKILL|signal|Exception"):
        run_ranks(2, _die, url, str(told))
    if told.exists():
        assert float(told.read_text().split()[0]) < PATIENCE + 10
    assert [entry.step for entry in s4weights.CheckpointStore(url).list()] == [1]
    run_ranks(2, _save_steps, url, [3])
    run_ranks(2, _load_steps, url, [1, 3])
    assert s4weights.CheckpointStore(url).verify()["clean"]


def _save_async(rank: int, url: str, kind: str) -> None:
    kind = dcp.state_dict_saver.AsyncCheckpointerType(kind)
    for step in (1, 2):
        state = sharded(step)
        future = dcp.async_save(
            state, storage_writer=StorageWriter(url, step=step), async_checkpointer_type=kind
        )
        # The state was staged: it may change.
        state["model"]["plain"].fill_(7.0)
        future.result()
    _load_steps(rank, url, [1, 2])


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_saves_in_the_background(tmp_path: Path, kind: str) -> None:
    run_ranks(2, _save_async, str(tmp_path / "run"), kind)


def _alone(rank: int, url: str) -> None:
    def state(step: int) -> dict[str, Any]:
        weights = values(rank, 5000)
        weights[step] += 1
        return {"w": weights, "mine": rank, "step": step}

    for step in (1, 2, 3):
        if step < 3 or rank == 0:  # Only one rank does the last save.
            writer = StorageWriter(url, step=step)
            alone = {"storage_writer": writer, "no_dist": step == 3, "use_collectives": False}
            dcp.save(state(step), **alone)
            assert writer.entry is not None
    dist.barrier()
    for step in (None, 1, 2):
        loaded = {"w": torch.zeros(5000), "mine": -1, "step": -1}
        dcp.load(loaded, storage_reader=StorageReader(url, step=step), planner=LoadPlanner())
        assert (loaded["mine"], loaded["step"]) == (rank, step or 2)
        assert same(loaded["w"], state(step or 2)["w"])
    with pytest.raises(CheckpointException, match="saved on their own"):
        dcp.load(loaded, storage_reader=StorageReader(url, step=3), planner=LoadPlanner())


def test_ranks_save_without_collectives(tmp_path: Path) -> None:
    run_ranks(2, _alone, str(tmp_path / "run"))
    entries = s4weights.CheckpointStore(tmp_path / "run").list()
    tags = sorted((e.step, e.tags["dcp.rank"], e.tags["dcp.ranks"]) for e in entries)
    wanted = [(1, "0", "2"), (1, "1", "2"), (2, "0", "2"), (2, "1", "2"), (3, "0", "2")]
    assert tags == wanted
    assert [e.kind for e in entries if e.step == 2] == ["delta", "delta"]
    state = {"w": torch.zeros(5000)}
    with pytest.raises(CheckpointException, match="1 ranks each saved on their own"):
        dcp.load(state, storage_reader=StorageReader(tmp_path / "run"), no_dist=True)


def test_ids_name_a_store_and_a_step(tmp_path: Path) -> None:
    state = {"w": values(1, 5000), "n": 3}
    for name, step in [("step-1000", 1000), ("2000", 2000), ("epoch=2-step=3000", 3000)]:
        where = tmp_path / "run" / name
        writer = StorageWriter()
        dcp.save(state, checkpoint_id=where, storage_writer=writer, no_dist=True)
        assert writer.entry is not None and writer.entry.step == step
        loaded = {"w": torch.zeros(5000), "n": 0}
        dcp.load(loaded, checkpoint_id=where, storage_reader=StorageReader(), no_dist=True)
        assert same(loaded["w"], state["w"]) and loaded["n"] == 3
    assert [e.step for e in s4weights.CheckpointStore(tmp_path / "run").list()] == [
        1000,
        2000,
        3000,
    ]
    assert StorageWriter.validate_checkpoint_id("s3://bucket/run/step-7")
    assert not StorageWriter.validate_checkpoint_id("s3://bucket/run/last")
    with pytest.raises(CheckpointException, match="a name that ends with the step"):
        raise CheckpointException("", {0: _error(lambda: StorageWriter().reset("runs/last"))})
    with pytest.raises(TypeError, match="not allowed with an existing store"):
        StorageWriter(s4weights.CheckpointStore(tmp_path), step=1, preset="fast")


def _error(work: Callable[[], object]) -> Any:
    try:
        work()
    except Exception as error:
        import traceback

        return error, traceback.extract_tb(error.__traceback__)
    raise AssertionError("no error")


def test_a_folder_that_was_deleted_is_begun_anew(tmp_path: Path) -> None:
    url = tmp_path / "run"
    for seed in (1, 2):
        for step in (1, 2):
            writer = StorageWriter(url, step=step)
            dcp.save({"w": values(seed + step, 5000)}, storage_writer=writer, no_dist=True)
        loaded = {"w": torch.zeros(5000)}
        dcp.load(loaded, storage_reader=StorageReader(url), no_dist=True)
        assert same(loaded["w"], values(seed + 2, 5000))
        assert [e.step for e in s4weights.CheckpointStore(url).list()] == [1, 2]
        shutil.rmtree(url)
    for steps in ([3], [4], [5, 6]):  # Also after a single use, and a third time.
        for step in steps:
            writer = StorageWriter(url, step=step)
            dcp.save({"w": values(1, 50)}, storage_writer=writer, no_dist=True)
        assert [e.step for e in s4weights.CheckpointStore(url).list()] == steps
        shutil.rmtree(url)


def test_a_writer_made_anew_keeps_what_was_stored(tmp_path: Path) -> None:
    weights = {"w": values(1, 5000)}
    dcp.save(weights, storage_writer=StorageWriter(tmp_path, step=1), no_dist=True)
    store = s4weights.CheckpointStore(tmp_path)
    data = tmp_path / "ck" / store.list()[0].id / "d-0"
    stored = data.read_bytes()
    data.write_bytes(bytes(len(stored)))
    weights["w"][7] += 1
    writer = pickle.loads(pickle.dumps(StorageWriter(tmp_path, step=2)))
    dcp.save(weights, storage_writer=writer, no_dist=True)
    assert writer.entry.kind == "delta", "the parent was not read back"
    data.write_bytes(stored)
    loaded = {"w": torch.zeros(5000)}
    dcp.load(loaded, storage_reader=StorageReader(tmp_path), no_dist=True)
    assert same(loaded["w"], weights["w"])


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    store = s4weights.CheckpointStore(tmp_path / "run")
    store.save_checkpoint({"w": values(1, 5000)}, 1)
    state = {"w": torch.zeros(5000)}
    for step, what in [(2, "no checkpoint for step 2"), (1, "use load_checkpoint")]:
        with pytest.raises(CheckpointException) as failed:
            dcp.load(state, storage_reader=StorageReader(store, step=step), no_dist=True)
        assert what in str(failed.value), failed.value
    with pytest.raises(CheckpointException, match="no step was given"):
        dcp.save(state, storage_writer=StorageWriter(store), no_dist=True)


def test_the_metadata_says_which_checkpoint_it_is_of(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    state = {"w": values(1, 4, 6), "turned": values(2, 4, 6).T}
    writer = StorageWriter(url, step=3)
    made = dcp.save(state, storage_writer=writer, no_dist=True).storage_meta
    assert writer.entry is not None
    assert (made.checkpoint_id, made.save_id) == (f"{url}/step-3", writer.entry.id)
    for reader in (StorageReader(url), StorageReader(url, step=3)):
        metadata = reader.read_metadata()
        found = metadata.storage_meta
        assert (found.save_id, found.load_id) == (writer.save_id, reader.load_id)
        assert pickle.loads(pickle.dumps(reader)).checkpoint_id == found.checkpoint_id
        for name, tensor in state.items():
            kept = metadata.state_dict_metadata[name].properties
            assert getattr(kept, "strides", tensor.stride()) == tensor.stride()
    assert found.checkpoint_id == f"{url}/step-3"
    # That id can be given to a call of DCP, and an id that a call was given is kept as it is.
    other = str(tmp_path / "other" / "ck_07")
    dcp.save(state, checkpoint_id=other, storage_writer=StorageWriter(), no_dist=True)
    reader, loaded = StorageReader(), {"w": torch.zeros(4, 6)}
    dcp.load(loaded, checkpoint_id=other, storage_reader=reader, no_dist=True)
    assert reader.checkpoint_id == other and same(loaded["w"], state["w"])
    before = reader.load_id
    dcp.load(loaded, checkpoint_id=found.checkpoint_id, storage_reader=reader, no_dist=True)
    assert reader.checkpoint_id == f"{url}/step-3" and reader.load_id != before


def _overwrite(rank: int, url: str) -> None:
    state = {"w": values(rank, 5)}
    for collectives in (True, False):
        steps = [(1, False), (1, True), (2, False)] if collectives else [(3, False), (4, False)]
        for step, overwrite in steps:
            writer = StorageWriter(url, step=step, overwrite=overwrite)
            dcp.save(state, storage_writer=writer, use_collectives=collectives)
        writer = StorageWriter(url, step=steps[-1][0], overwrite=False)
        failure = CheckpointException if collectives else s4weights.ConflictError
        with pytest.raises(failure, match="Checkpoint already exists"):
            dcp.save(state, storage_writer=writer, use_collectives=collectives)
        dist.barrier()


def test_a_step_that_is_there_is_refused_on_request(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    run_ranks(2, _overwrite, url)
    with s4weights.CheckpointStore(url) as store:
        assert [entry.step for entry in store.list()] == [1, 1, 2, 3, 3, 4, 4]


class Many:
    """A pickle of a few bytes that asks for gigabytes."""

    def __reduce__(self) -> Any:
        return (bytes, (1 << 33,))


@pytest.mark.parametrize("planner", [None, SavePlanner()])
def test_bytes_and_streams_come_back_without_running_code(tmp_path: Path, planner: Any) -> None:
    url = str(tmp_path / "run")
    stream = io.BytesIO(b"what a data loader noted")
    stream.seek(4)
    state = {"data": {"raw": b"\0\xff", "stream": stream, "empty": io.BytesIO()}}
    many: Any = {"data": Many()}
    arguments: dict[str, Any] = {"planner": planner, "no_dist": True}
    before = set(torch.serialization.get_safe_globals())
    dcp.save(state, storage_writer=StorageWriter(url, step=1), **arguments)
    with s4weights.patch():
        dcp.save(state, storage_writer=StorageWriter(url, step=2), **arguments)
    for step in (1, 2):
        found: Any = {"data": {"raw": b"", "stream": None, "empty": None}}
        reader = StorageReader(url, step=step)
        dcp.load(found, storage_reader=reader, planner=LoadPlanner(), no_dist=True)
        data = found["data"]
        assert data["raw"] == b"\0\xff" and data["empty"].getvalue() == b""
        assert data["stream"].tell() == 4 and data["stream"].getvalue() == stream.getvalue()
    assert set(torch.serialization.get_safe_globals()) == before
    dcp.save(many, storage_writer=StorageWriter(url, step=3), **arguments)
    with pytest.raises(CheckpointException, match="Weights only load failed"):
        dcp.load(many, storage_reader=StorageReader(url), planner=LoadPlanner(), no_dist=True)


def _cached_plans(rank: int, url: str) -> None:
    for cached in (dcp.DefaultSavePlanner, SavePlanner):
        reader = StorageReader(f"{url}-{cached.__name__}")
        for step in (1, 2, 3):
            state = {"w": torch.full((4,), float(step + rank)), "step": step}
            state = {f"{rank}.{name}": value for name, value in state.items()}
            planner = cached(enable_plan_caching=True)
            writer = StorageWriter(f"{url}-{cached.__name__}", step=step)
            dcp.save(state, storage_writer=writer, planner=planner)
            loaded: dict[str, Any] = {f"{rank}.w": torch.zeros(4), f"{rank}.step": None}
            # The same reader loads the newest checkpoint each time.
            dcp.load(loaded, storage_reader=reader, planner=LoadPlanner())
            assert torch.equal(loaded[f"{rank}.w"], state[f"{rank}.w"]), step
            assert loaded[f"{rank}.step"] == step


def test_plans_may_be_cached_and_readers_used_again(tmp_path: Path) -> None:
    run_ranks(2, _cached_plans, str(tmp_path / "store"))


def test_a_plan_of_another_writer_may_be_cached(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemWriter

    state = {"a": torch.ones(3)}
    for step, writer in enumerate(
        [FileSystemWriter(tmp_path / "torch"), StorageWriter(tmp_path / "ours", step=1)]
    ):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save({"a": state["a"] * step}, storage_writer=writer, planner=planner, no_dist=True)
    dcp.load(state, storage_reader=StorageReader(tmp_path / "ours"), no_dist=True)
    assert torch.equal(state["a"], torch.ones(3))


def test_any_key_can_be_saved(tmp_path: Path) -> None:
    state = {"": torch.ones(2), "w@2,0": torch.ones(3), "~": torch.ones(4), "a~b": torch.ones(5)}
    dcp.save(state, storage_writer=StorageWriter(tmp_path, step=1), no_dist=True)
    loaded = {name: torch.zeros_like(value) for name, value in state.items()}
    dcp.load(loaded, storage_reader=StorageReader(tmp_path, step=1), no_dist=True)
    assert all(torch.equal(loaded[name], value) for name, value in state.items())
    stored = s4weights.load_checkpoint(tmp_path)
    assert stored.keys() >= {"~", "w~12,0", "~0", "a~0b"}


def test_what_a_save_cannot_be_is_refused_before_it_begins(tmp_path: Path) -> None:
    for step in (-1, "5", 5.0, True):
        with pytest.raises(ValueError, match="step: expected a non-negative integer"):
            StorageWriter(tmp_path, step=step)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not finite"):
        StorageWriter(tmp_path, step=1, metrics={"loss": float("nan")})
    for flag in ("base", "overwrite"):
        with pytest.raises(TypeError, match=f"{flag}='no'"):
            StorageWriter(tmp_path, step=1, **{flag: "no"})  # type: ignore[arg-type]
    for name in ("v1.5", "step--5"):
        assert not StorageWriter.validate_checkpoint_id(tmp_path / name)
        with pytest.raises(ValueError, match="ends with the step"):
            StorageWriter().reset(tmp_path / name)


def test_a_store_that_is_closed_waits_for_its_save(tmp_path: Path) -> None:
    state = {"w": torch.ones(1000)}
    stager = s4weights.dcp.Stager()
    with s4weights.CheckpointStore(tmp_path) as store:
        future = s4weights.dcp.async_save(state, store, 1, stager=stager, no_dist=True)
    assert future.done() and s4weights.CheckpointStore(tmp_path).latest() == 1


def test_ranks_of_a_machine_share_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def threads(ranks: str | None, cores: int = 32, **options: int) -> int | None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if ranks is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        monkeypatch.setattr(os, "cpu_count", lambda: 32)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
        name = f"{ranks}-{cores}-{len(options)}"
        found: int | None = StorageWriter(tmp_path / name, step=1, **options)._place.store._arguments["threads"]
        return found

    assert threads(None) is None and threads("1") is None and threads("many") is None
    assert threads("2") == 16 and threads("64") == 1
    assert threads("4", cores=16) == 4, "of the cores of a container"
    assert threads("4", cores=8) is None, "bound to cores of its own"
    assert threads("4", threads=3) == 3


class Late(StorageReader):
    """Rank 1 looks for the checkpoint after another job has saved one, rank 0 before."""

    step = 2

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            dist.barrier()
            return super().read_metadata(*args, **kwargs)
        found = super().read_metadata(*args, **kwargs)
        writer = StorageWriter(self._place.store, step=Late.step)
        dcp.save({"w": torch.full((50,), 7.0)}, storage_writer=writer, no_dist=True)
        dist.barrier()
        return found


def _torn(rank: int, url: str) -> None:
    saved = {"w": torch.full((50,), 1.0)}
    for attempt, step in enumerate([None, None, 1]):
        store, Late.step = f"{url}-{attempt}", step or 2
        dcp.save(saved, storage_writer=StorageWriter(store, step=1))
        state = {"w": torch.zeros(50)}
        hint = "load again, or pass the step$" if step is None else "load again$"
        with pytest.raises(CheckpointException) as failed:
            coordinator = {"coordinator_rank": 1} if attempt == 1 else {}
            load = dcp.load_state_dict if coordinator else dcp.load
            load(state, storage_reader=Late(store, step=step), **coordinator)
        ((who, (error, _)),) = failed.value.failures.items()
        assert who == len(coordinator) and isinstance(error, s4weights.ConflictError)
        assert error.args == pickle.loads(pickle.dumps(error)).args
        ids = [entry.id for entry in s4weights.CheckpointStore(store).list()]
        found = rf"rank 0 step 1 \({ids[0]}\), rank 1 step {Late.step} \({ids[1]}\): {hint}"
        assert re.search(found, str(error)), error
        assert not state["w"].any()
        dcp.load(state, storage_reader=StorageReader(store))
        assert state["w"][0] == 7.0


def test_ranks_that_find_different_checkpoints_load_none(tmp_path: Path) -> None:
    run_ranks(2, _torn, str(tmp_path / "run"))


def _agreed(rank: int, url: str) -> None:
    dcp.save({"w": torch.full((50,), 1.0)}, storage_writer=StorageWriter(url, step=1))
    s4weights.dcp.StorageReader = Late  # type: ignore[misc]
    state = {"w": torch.zeros(50)}
    s4weights.dcp.load(state, url)
    assert state["w"][0] == 1.0
    s4weights.dcp.StorageReader = StorageReader  # type: ignore[misc]
    s4weights.dcp.load(state, url, process_group=dist.new_group([0, 1]))
    assert state["w"][0] == 7.0
    with pytest.raises(CheckpointException, match="no checkpoint"):
        s4weights.dcp.load(state, f"{url}-none")
    # Checkpoints that ranks saved on their own have the step in common only.
    for step in (1, 2):
        writer = StorageWriter(f"{url}-own", step=step)
        own = {"w": torch.full((50,), float(10 * step + rank))}
        dcp.save(own, storage_writer=writer, use_collectives=False)
    dist.barrier()
    s4weights.dcp.load(state, f"{url}-own")
    assert state["w"][0] == 20 + rank
    solo = [dist.new_group([member]) for member in (0, 1)]
    s4weights.dcp.load(state, url, process_group=solo[rank])
    assert state["w"][0] == 7.0
    s4weights.dcp.load(state, url, 1, no_dist=True)
    assert state["w"][0] == 1.0


def test_ranks_agree_on_the_newest_checkpoint(tmp_path: Path) -> None:
    run_ranks(2, _agreed, str(tmp_path / "run"))
