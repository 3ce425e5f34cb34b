"""Garbage collection is suspended while objects are built, and runs again afterwards."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from test_interrupt import Raising

import s4weights
from s4weights._collection import without_collection


@pytest.fixture(autouse=True)
def collects() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_it_is_suspended_and_enabled_again() -> None:
    assert without_collection(gc.isenabled) is False and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        without_collection(lambda: 1 / 0)
    assert gc.isenabled()


def test_who_has_it_off_keeps_it_off() -> None:
    gc.disable()
    assert without_collection(gc.isenabled) is False and not gc.isenabled()


@contextlib.contextmanager
def suspended_elsewhere() -> Iterator[Callable[[], None]]:
    """Another thread has it suspended until the end, or until the given function is called."""
    inside, go_on = threading.Event(), threading.Event()

    def work() -> None:
        inside.set()
        go_on.wait(120)

    thread = threading.Thread(target=without_collection, args=(work,))
    thread.start()
    inside.wait(120)

    def end() -> None:
        go_on.set()
        thread.join()

    yield end
    end()


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_threads_that_overlap(first_ends_first: bool) -> None:
    with suspended_elsewhere() as end:
        without_collection(end if first_ends_first else lambda: None)
    assert gc.isenabled()


def test_between_the_question_and_the_suspension(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may suspend it, and enable it again, in between."""
    ask = gc.isenabled
    asked: list[bool] = []

    def isenabled() -> bool:
        asked.append(ask())
        if len(asked) == 1:
            without_collection(lambda: None)
        return asked[0]

    monkeypatch.setattr(gc, "isenabled", isenabled)
    without_collection(lambda: None)
    monkeypatch.undo()
    assert gc.isenabled()


def test_an_interrupted_load() -> None:
    stream = io.BytesIO()
    s4weights.save({"w": torch.ones(3)}, stream)

    def load() -> None:
        stream.seek(0)
        s4weights.load(stream)

    for _ in Raising("_load.py", "_collection.py").rounds(load):
        assert gc.isenabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_while_another_thread_has_it_suspended() -> None:
    with suspended_elsewhere():
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
        status = os.waitpid(child, 0)[1]
    assert status == 0 and gc.isenabled()
