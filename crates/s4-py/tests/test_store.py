"""Checkpoint stores: a run saves, resumes, tidies up."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

import s4weights
from compare import assert_identical
from s4weights import CheckpointStore, Retention


def s3_servers() -> dict[str, str]:
    """S3 servers that the environment names."""
    return dict(pair.split("=", 1) for pair in os.getenv("S4_TEST_S3", "").split(",") if pair)


@pytest.fixture(params=["folder", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Arguments of a store that does not exist yet."""
    if request.param == "folder":
        return {"url": tmp_path / "runs" / "a"}
    if request.param == "memory":
        return {"url": f"memory://{uuid4()}/a"}
    servers = s3_servers()
    if not servers:
        pytest.skip("S4_TEST_S3 names no server; `cargo xtask test` starts some")
    options = {
        "key": "test",
        "secret": "test",
        "endpoint_url": next(iter(servers.values())),
        "region": "us-east-1",
    }
    return {"url": f"s3://s4test/{uuid4()}", "storage_options": options}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    with CheckpointStore(tmp_path / "store") as store:
        yield store


class Run:
    """A training run with tied weights, views and values that are no tensors."""

    def __init__(self, size: int = 128) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.Linear(size, size))
        self.model[1].weight = self.model[0].weight
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.size = size

    def train(self) -> Run:
        loss = self.model(torch.randn(4, self.size)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return self

    def state(self) -> dict[str, Any]:
        model = self.model.state_dict()
        return {
            "model": model,
            "optimizer": self.optimizer.state_dict(),
            "view": model["0.weight"][3:],
            "half": model["0.weight"].to(torch.bfloat16),
            "rng": torch.get_rng_state(),
            "loss": float("nan"),
            "step": 3,
        }


def test_a_run_comes_back_bit_for_bit(place: dict[str, Any]) -> None:
    run, states = Run(), {}
    with CheckpointStore(**place, max_chain=3) as store:
        assert (store.latest(), store.list()) == (None, [])
        for step in range(0, 50, 10):
            run.train()
            states[step] = copy.deepcopy(run.state())
            entry = store.save_checkpoint(run.state(), step, {"loss": step / 7}, {"by": "test"})
            assert entry.report["bytes_in"] == entry.raw_bytes
        kinds = [entry.kind for entry in store.list()]
        assert kinds == ["base", "delta", "delta", "base", "delta"]
        assert store.latest() == 40
    with CheckpointStore(**place) as store:
        entries = store.list()
        assert entries[2].parent == entries[1].id and entries[0].parent is None
        assert [entry.since_base for entry in entries] == [0, 1, 2, 0, 1]
        assert entries[1].bytes < entries[0].bytes < entries[0].raw_bytes
        assert entries[1].metrics == {"loss": 10 / 7} and entries[1].tags == {"by": "test"}
        for step, state in states.items():
            assert_identical(store.load_checkpoint(step), state)
        assert_identical(store.load_checkpoint(), states[40])
        assert store.verify()["clean"]
        # The next process goes on where this one stopped.
        assert store.save_checkpoint(run.train().state(), 50).kind == "delta"
        assert_identical(store.load_checkpoint(50), run.state())


def test_functions_of_the_module(place: dict[str, Any]) -> None:
    options = {k: v for k, v in place.items() if k != "url"}
    state = Run().train().state()
    entry = s4weights.save_checkpoint(state, place["url"], 7, {"loss": 1}, **options)
    assert (entry.step, entry.kind, entry.metrics) == (7, "base", {"loss": 1.0})
    assert_identical(s4weights.load_checkpoint(place["url"], **options), state)
    assert_identical(s4weights.load_checkpoint(place["url"], 7, **options), state)
    with pytest.raises(s4weights.NotFoundError, match="step 8"):
        s4weights.load_checkpoint(place["url"], 8, **options)


def test_objects_that_need_a_pickle(store: CheckpointStore) -> None:
    state = {"config": Path("x"), "w": torch.rand(5000)}
    for step in range(2):
        state["w"][0] += 1
        store.save_checkpoint(state, step)
    loaded = store.load_checkpoint(weights_only=False)
    assert loaded["config"] == state["config"] and torch.equal(loaded["w"], state["w"])
    with pytest.raises(s4weights.UnsupportedFormatError, match="pickle"):
        store.load_checkpoint(keys=["w"])
    with pytest.raises(s4weights.UnsafeLoadError):
        store.load_checkpoint()


def test_keys_take_parts_and_read_nothing_else(store: CheckpointStore) -> None:
    run = Run().train()
    store.save_checkpoint(run.state(), 1)
    store.save_checkpoint(run.train().state(), 2)
    state = run.state()
    read: list[int] = []
    model = store.load_checkpoint(keys=["model"], progress=lambda done, total: read.append(total))
    assert list(model) == ["model"]
    assert_identical(model["model"], state["model"])
    assert model["model"]["0.weight"] is not None and read[-1] < 150_000
    # A part of a flat state dict, and two parts that share a storage.
    part = store.load_checkpoint(keys=["model.1", "view", "optimizer.param_groups"])
    assert set(part["model"]) == {"1.weight", "1.bias"}
    storages = [t.untyped_storage()._cdata for t in (part["view"], part["model"]["1.weight"])]
    assert storages[0] == storages[1]
    assert part["optimizer"] == {"param_groups": state["optimizer"]["param_groups"]}
    moment = store.load_checkpoint(keys=["optimizer.state.0.exp_avg"])
    (first,) = moment["optimizer"]["state"][0].values()
    assert_identical(first, state["optimizer"]["state"][0]["exp_avg"])
    with pytest.raises(KeyError, match="nowhere"):
        store.load_checkpoint(keys=["model", "nowhere"])
    with pytest.raises(TypeError):
        store.load_checkpoint(keys="model")


def test_the_same_object_in_two_places_stays_one_with_keys(store: CheckpointStore) -> None:
    w = torch.rand(100)
    store.save_checkpoint({"skip": torch.ones(3), "a": {"w": w}, "b": w, "c": [w]}, 0)
    part = store.load_checkpoint(keys=["b", "c"])
    assert part["b"] is part["c"][0] and torch.equal(part["b"], w)


def test_map_location(store: CheckpointStore) -> None:
    store.save_checkpoint(Run().state(), 0)
    loaded = store.load_checkpoint(map_location="meta")
    assert loaded["model"]["0.weight"].device.type == "meta"
    seen = []
    store.load_checkpoint(map_location=lambda storage, where: seen.append(where) or storage)
    assert set(seen) == {"cpu"}


def test_weights_and_optimizer_lie_apart_and_roles_are_noted(tmp_path: Path) -> None:
    run = Run().train()
    with CheckpointStore(tmp_path / "store") as store:
        store.save_checkpoint(run.state(), 0)
        (manifest,) = (tmp_path / "store").rglob("manifest")
        table = manifest.read_bytes()
    assert b'"kind":"weights"' in table and b'"kind":"optimizer"' in table
    for kind in (b"weight", b"exp_avg", b"exp_avg_sq"):
        assert table.count(b'"kind":"%s"' % kind) == 3, kind
    assert b'"lr":0.0001' in table and b'"betas1":0.999' in table
    # A file has the same table.
    s4weights.save(run.state(), tmp_path / "x.s4w")
    assert b'"kind":"exp_avg_sq"' in (tmp_path / "x.s4w").read_bytes()


def test_retention(tmp_path: Path) -> None:
    policy = Retention(keep_last=1, keep_every=10, best=(("loss", 1, "min"),))
    with CheckpointStore(tmp_path, retention=policy, max_chain=1) as store:
        for step, loss in [(10, 5.0), (11, 0.1), (12, 3.0), (13, 4.0)]:
            store.save_checkpoint({"w": torch.rand(5000)}, step, {"loss": loss})
        assert [entry.step for entry in store.list()] == [10, 11, 13]
        assert store.apply_retention(Retention(keep_last=1))
        assert [entry.step for entry in store.list()] == [13]
    with pytest.raises(ValueError, match="min"):
        wrong: Any = "least"
        CheckpointStore(tmp_path).apply_retention(Retention(best=(("loss", 1, wrong),)))


def test_deleting_pinning_rebasing_and_collecting(place: dict[str, Any]) -> None:
    run, states = Run(), []
    with CheckpointStore(**place, max_chain=8, max_hops=7) as store:
        for step in range(4):
            states.append(copy.deepcopy(run.train().state()))
            store.save_checkpoint(states[-1], step)
        with pytest.raises(s4weights.ConflictError, match="needed"):
            store.delete(0)
        rebased = store.rebase(2)
        assert (rebased.kind, rebased.step) == ("base", 2)
        store.pin(1)
        assert [entry.pinned for entry in store.list()] == [False, True, False, False]
        with pytest.raises(s4weights.ConflictError, match="pinned"):
            store.delete(1)
        store.unpin(1)
        store.delete(1)
        store.delete(0)
        with pytest.raises(s4weights.NotFoundError):
            store.delete(0)
        with pytest.raises(ValueError, match="grace"):
            store.gc(grace=1)
        plan = store.gc(True, grace=0, exclusive=True)
        assert plan["dry_run"] and len(plan["deleted"]) == 3 and plan["deleted_bytes"] > 0
        assert len(store.gc(grace=0, exclusive=True)["deleted"]) == 3
        assert store.gc(grace=0, exclusive=True)["deleted"] == []
        assert [entry.step for entry in store.list()] == [2, 3]
        for step in (2, 3):
            assert_identical(store.load_checkpoint(step), states[step])
        assert store.save_checkpoint(run.train().state(), 4).kind == "delta"


def test_falling_back_past_damage_is_asked_for_and_told_of(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, max_chain=1) as store:
        states = [Run().train().state() for _ in range(2)]
        for step, state in enumerate(states):
            store.save_checkpoint(state, step)
        newest = store.list()[-1]
        for file in (p for p in tmp_path.rglob("*") if newest.id in str(p) and p.is_file()):
            if file.name != "manifest":
                data = bytearray(file.read_bytes())
                data[len(data) // 2] ^= 1
                file.write_bytes(data)
        with pytest.raises(s4weights.CorruptDataError, match="step 1"):
            store.load_checkpoint()
        with pytest.warns(UserWarning, match="step 1 is damaged"):
            loaded = store.load_checkpoint(fallback=True)
        assert_identical(loaded, states[0])
        report = store.verify()
        assert not report["clean"] and report["findings"][0]["id"] == newest.id
        assert store.verify(0)["clean"]
        with pytest.raises(ValueError, match="fallback"):
            store.load_checkpoint(1, fallback=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_identical(store.load_checkpoint(0), states[0])


def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path / "none") as store:
        assert store.latest() is None and store.list() == []
        with pytest.raises(s4weights.NotFoundError):
            store.load_checkpoint()
        with pytest.raises(s4weights.NotFoundError):
            store.gc()
        assert not (tmp_path / "none").exists()
        store.save_checkpoint({}, 0)
        assert store.load_checkpoint() == {}
    with pytest.raises(ValueError, match="closed"):
        store.latest()


def test_arguments_are_checked(store: CheckpointStore) -> None:
    for step in (-1, 1.5, "1", True):
        with pytest.raises(ValueError, match="step"):
            store.save_checkpoint({}, step)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="loss"):
        store.save_checkpoint({}, 1, {"loss": float("inf")})
    with pytest.raises(ValueError, match="secrte"):
        CheckpointStore("s3://b/p", storage_options={"secrte": "x"}).list()
    with pytest.raises(ValueError, match="max_chain=0"):
        CheckpointStore(store.url, max_chain=0).save_checkpoint({}, 0)
    with pytest.raises(ValueError, match="1 to 63"):
        CheckpointStore(store.url, max_hops=64).save_checkpoint({}, 0)
    assert store.list() == []


def test_two_writers(place: dict[str, Any]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def run(writer: int) -> list[tuple[int, Any]]:
        with CheckpointStore(**place) as store:
            run, out = Run(), []
            for step in range(writer, writer + 4):
                out.append((step, copy.deepcopy(run.train().state())))
                store.save_checkpoint(out[-1][1], step)
            return out

    with ThreadPoolExecutor(2) as threads:
        runs = list(threads.map(run, [100, 200]))
    with CheckpointStore(**place) as store:
        assert sorted(e.step for e in store.list()) == [*range(100, 104), *range(200, 204)]
        for step, state in (pair for run in runs for pair in run):
            assert_identical(store.load_checkpoint(step), state)


def test_what_was_deleted_is_listed_again(tmp_path: Path) -> None:
    state = {"w": torch.rand(5000)}
    with CheckpointStore(tmp_path) as store:
        saved = store.save_checkpoint(state, 1)
        store.delete(1)
        assert store.list() == []
        assert [entry.id for entry in store.undelete(saved.id)] == [saved.id]
        assert_identical(store.load_checkpoint(1), state)
        seen = store.verify()
        assert (seen["restores"], seen["does_not_restore"]) == ([saved.id], [])


def test_a_store_that_is_only_read(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        for step in (1, 2):
            store.save_checkpoint({"step": step}, step)
    first = min((tmp_path / "log").iterdir())
    first.write_bytes(b"damaged")
    for view in tmp_path.glob("logck/*"):
        view.unlink()
    with pytest.raises(s4weights.CorruptDataError, match="repair"):
        CheckpointStore(tmp_path).save_checkpoint({}, 3)
    before = sorted(p.name for p in tmp_path.rglob("*"))
    with CheckpointStore(tmp_path, read_only=True) as store:
        store.list()
        with pytest.raises(s4weights.S4Error):
            store.save_checkpoint({}, 3)
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="writers"):
        CheckpointStore(tmp_path, writers="some")
    with CheckpointStore(tmp_path, writers="single") as store:
        store.save_checkpoint({"a": 1}, 1)
        assert CheckpointStore(tmp_path).load_checkpoint() == {"a": 1}
        with pytest.raises(s4weights.ConflictError):
            CheckpointStore(tmp_path, timeout=5).save_checkpoint({}, 2)


def test_arguments_that_make_no_sense_are_refused_at_once(tmp_path: Path) -> None:
    wrong: list[tuple[Any, type[Exception]]] = [
        *((r, TypeError) for r in (True, False, 2.0, "3", {"keep_last": 2})),
        *((r, ValueError) for r in (0, -1)),
    ]
    # An empty variable is not the current folder.
    with pytest.raises(ValueError, match="path is empty"):
        CheckpointStore("")
    for retention, error in wrong:
        with pytest.raises(error, match=r"retention=|keep_last="):
            CheckpointStore(tmp_path, retention=retention)
    best: list[tuple[Any, type[Exception]]] = [
        (("loss", 3, "min"), TypeError),
        ([("loss", 3, "low")], ValueError),
        ([("loss", 0, "min")], ValueError),
        ([(3, "loss", "min")], TypeError),
    ]
    for rules, error in best:
        with pytest.raises(error, match="best"):
            Retention(best=rules)
    for number in ({"keep_every": 0}, {"keep_every": -5}, {"keep_last": 0}):
        with pytest.raises(ValueError, match="of 1 or more"):
            Retention(**number)
    for step in (1 << 64, -1, True, 1.0, "1"):
        with pytest.raises(ValueError, match="step: expected a non-negative integer"):
            CheckpointStore(tmp_path).save_checkpoint({}, step)  # type: ignore[arg-type]
    options: list[dict[str, Any]] = [
        *({"max_chain": 0}, {"max_hops": -1}, {"threads": -1}, {"parent_memory": -1}),
        *({"bandwidth": 0}, {"preset": "quick"}),
    ]
    for option in options:
        with pytest.raises(ValueError, match=next(iter(option))):
            CheckpointStore(tmp_path, **option)
    with pytest.raises(TypeError, match="a folder or a URL"):
        CheckpointStore(b"folder")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="preset"):
        s4weights.patch(preset="quick")
    with pytest.raises(TypeError, match="reporter"):
        s4weights.add_reporter("x")  # type: ignore[arg-type]


def test_errors_of_the_system_are_also_python_s_own(tmp_path: Path) -> None:
    for number, kind in [(errno.EACCES, PermissionError), (errno.EISDIR, IsADirectoryError)]:
        error = s4weights.StorageError(number, "no", "x")
        assert isinstance(error, s4weights.StorageError) and isinstance(error, kind)
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and (again.errno, again.filename) == (number, "x")
    with pytest.raises(IsADirectoryError):
        s4weights.save({}, tmp_path)
