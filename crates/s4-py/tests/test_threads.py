"""One store, many threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from compare import TOO_LONG
from s4weights import CheckpointStore, PendingSave


def state_of(step: int, size: int = 100_000) -> dict[str, Any]:
    """A state in which every value tells the step."""
    return {"w": torch.full((size,), float(step)), "step": torch.tensor(step)}


def is_of(state: dict[str, Any], step: int) -> bool:
    return bool((state["w"] == step).all()) and int(state["step"]) == step


def together(*works: Callable[[], object]) -> None:
    """Runs all of them at once; raises an error of any of them."""
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> object:
        barrier.wait()
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(run, work) for work in works]:
            done.result()


@pytest.mark.parametrize("blocking", [True, False])
def test_every_checkpoint_has_its_own_values(tmp_path: Path, blocking: bool) -> None:
    with CheckpointStore(tmp_path) as store:

        def save(first: int) -> None:
            for step in range(first, first + 10):
                # The caller's tensors change as soon as the call returns.
                state = state_of(step)
                store.save_checkpoint(state, step, blocking=blocking)
                state["w"].fill_(-1)

        together(lambda: save(0), lambda: save(100), lambda: save(200), lambda: save(300))
    with CheckpointStore(tmp_path) as store:
        steps = [entry.step for entry in store.list()]
        assert sorted(steps) == [s + i for s in (0, 100, 200, 300) for i in range(10)]
        assert [step for step in steps if not is_of(store.load_checkpoint(step), step)] == []


def test_saving_loading_and_listing_at_once(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        store.save_checkpoint(state_of(0), 0)
        done = threading.Event()

        def save() -> None:
            for step in range(1, 12):
                saved = store.save_checkpoint(state_of(step), step, blocking=step % 3 == 0)
            if isinstance(saved, PendingSave):
                saved.wait()
            done.set()

        def load() -> None:
            while not done.is_set():
                entry = store.list()[-1]
                assert is_of(store.load_checkpoint(entry.id), entry.step)  # type: ignore[arg-type]

        def tend() -> None:
            while not done.is_set():
                assert store.latest() is not None
                store.pin(0)
                store.unpin(0)
                assert store.verify(0)["clean"]

        together(save, load, load, tend)
        assert [entry.step for entry in store.list()] == list(range(12))


def test_closing_during_a_save(tmp_path: Path) -> None:
    """Closing waits for saves that have begun; saves that begin later are refused."""
    for round in range(8):
        folder = tmp_path / str(round)
        store = CheckpointStore(folder)
        saved: list[int] = []

        def save(first: int, store: CheckpointStore = store, saved: list[int] = saved) -> None:
            for step in range(first, first + 50):
                try:
                    done = store.save_checkpoint(state_of(step), step, blocking=step % 2 == 0)
                    entry = done.wait() if isinstance(done, PendingSave) else done
                except ValueError as error:
                    assert "closed" in str(error)
                    return
                saved.append(entry.step)

        together(lambda: save(0), lambda: save(100), store.close)
        store.close()
        with CheckpointStore(folder) as store:
            assert sorted(entry.step for entry in store.list()) == sorted(saved)


def test_a_pending_save_that_many_wait_for(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        pending = store.save_checkpoint(state_of(1), 1, blocking=False)
        waits = [lambda: pending.wait(60)] * 4
        together(*waits, lambda: store.load_checkpoint(1), lambda: store.save_checkpoint({}, 2))
        # An error is raised to each caller that waits for the save, and by the store to one other.
        failing = store.save_checkpoint({}, 3, TOO_LONG, blocking=False)
        raised: list[str] = []

        def settle() -> None:
            try:
                store.load_checkpoint(1)
            except s4weights.LimitError as error:
                raised.append(str(error))

        together(settle, settle, settle)
        assert len(raised) == 1
        with pytest.raises(s4weights.LimitError, match="log entry"):
            failing.wait()


def test_files_by_many_threads(tmp_path: Path) -> None:
    """`save`, `load`, `verify`, `inspect` and `load_into` of one file at once."""
    path = tmp_path / "a.s4w"
    s4weights.save(state_of(0), path)

    def work(step: int) -> None:
        target = state_of(-1)
        s4weights.load_into(target, path)
        assert is_of(target, int(target["step"]))
        loaded = s4weights.load(path)
        assert is_of(loaded, int(loaded["step"]))
        s4weights.save(state_of(step), path)
        assert s4weights.verify(path)["tensors"] == len(s4weights.inspect(path)["tensors"]) == 2

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(40)))
    last = s4weights.load(path)
    assert is_of(last, int(last["step"]))


def test_a_progress_function_cannot_save_to_the_same_store(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        store.save_checkpoint(state_of(0), 0)
        problems: list[str] = []

        def nested(work: Callable[[], object]) -> Callable[[int, int], None]:
            def progress(done: int, total: int) -> None:
                try:
                    work()
                except RuntimeError as error:
                    problems.append(str(error))

            return progress

        saving = nested(lambda: store.save_checkpoint({}, 9))
        store.save_checkpoint(state_of(1), 1, progress=saving)
        store.save_checkpoint(state_of(2), 2, progress=nested(store.close))
        assert problems and all("progress function" in problem for problem in problems)
        problems.clear()
        loading = nested(lambda: store.load_checkpoint())
        store.save_checkpoint(state_of(3), 3, progress=loading, blocking=False).wait(60)
        assert problems and all("progress function" in problem for problem in problems)
        # Calls that do not wait for the save work.
        seen: list[object] = []
        listing = nested(lambda: seen.append(store.latest()))
        store.save_checkpoint(state_of(4), 4, progress=listing, blocking=False).wait(60)
        store.save_checkpoint(state_of(5), 5, progress=listing)
        assert 3 in seen and 4 in seen
        assert [entry.step for entry in store.list()] == [0, 1, 2, 3, 4, 5]
