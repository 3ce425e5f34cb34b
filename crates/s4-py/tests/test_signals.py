"""An exception of a signal handler in the middle of a call is passed on as it is, and means
nothing.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import s4weights
import s4weights.numpy
from s4weights import CheckpointStore, _explain, _pickled, _tree
from s4weights import _storages as storages
from s4weights.sync import Publisher, Subscriber

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs signals")

KINDS = [ValueError, RuntimeError, KeyError]


class Stop:
    """A handler that is an object."""

    def __init__(self, kind: type[Exception]) -> None:
        self._kind = kind

    def __call__(self, number: int, frame: object) -> None:
        # As programs do so that a second signal ends them.
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        self.end()

    def end(self) -> None:
        raise self._kind("stopped")


@pytest.fixture(autouse=True)
def handler() -> Iterator[Callable[[Any], None]]:
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: (signal.signal(signal.SIGUSR1, handler), None)[1]
    signal.signal(signal.SIGUSR1, before)


def interrupting(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is interrupted."""

    def call(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pickled", [False, True])
def test_it_is_no_reason_to_load_an_older_checkpoint(
    pickled: bool, kind: Any, handler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = [1]
    more = {"x": shared, "y": shared} if pickled else {}  # makes it a pickle
    with CheckpointStore(tmp_path) as store:
        for step in (1, 2):
            store.save_checkpoint({"w": torch.full((3,), step), **more}, step)
        with monkeypatch.context() as patch:
            if pickled:
                call = _pickled._PersistentLoad.__call__
                patch.setattr(_pickled._PersistentLoad, "__call__", interrupting(call))
            else:
                patch.setattr(_tree, "natural", interrupting(_tree.natural))
            handler(Stop(kind))
            with pytest.raises(kind, match="stopped") as caught:
                store.load_checkpoint(fallback=True)
            assert type(caught.value) is kind
        assert store.load_checkpoint(fallback=True)["w"].eq(2).all()


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_not_damage(
    kind: Any, handler: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = functools.partial(Stop(kind).__call__)
    # Within the `try` statements that expect errors of PyTorch.
    for obj, owner, name in (
        (torch.device("cpu"), _tree, "_string"),
        (torch.nn.Parameter(torch.ones(3)), torch.nn, "Parameter"),
        (torch.ones(3), torch, "empty"),
    ):
        s4weights.save(obj, path)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupting(getattr(owner, name)))
            handler(place)
            with pytest.raises(kind, match="stopped") as caught:
                s4weights.load(path, weights_only=False)
            assert type(caught.value) is kind
    s4weights.numpy.save({"w": np.ones(3)}, path)
    monkeypatch.setattr(s4weights.numpy, "natural", interrupting(_tree.natural))
    handler(place)
    with pytest.raises(kind, match="stopped") as caught:
        s4weights.numpy.load(path)
    assert type(caught.value) is kind


@pytest.mark.parametrize("kind", KINDS)
def test_nor_is_a_pickle_broken(kind: Any, handler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = b"\x80\x02]q\x00(K\x01K\x02e."
    assert not _explain.is_broken(stream) and _explain.is_broken(stream[:-1])
    monkeypatch.setattr(_explain, "sketch", interrupting(_explain.sketch))
    for call in (_explain.is_broken, _explain.find_refused):
        handler(lambda number, frame: Stop(kind).end())
        with pytest.raises(kind, match="stopped"):
            call(stream)


def test_other_errors_are_not_taken_for_it(handler: Any) -> None:
    def fails() -> None:
        raise ValueError("x")

    handler(Stop(ValueError))
    with pytest.raises(ValueError) as caught:
        fails()
    assert not storages.is_of_signal(caught.value)
    handler(lambda *_: fails())
    with pytest.raises(ValueError) as caught:
        signal.raise_signal(signal.SIGUSR1)
    assert storages.is_of_signal(caught.value)


def raised_by_handler(handler: Any, call: Callable[[], object]) -> list[Exception]:
    """Calls a function in a signal handler; the errors go to the list that is returned."""
    raised: list[Exception] = []

    def run(number: int, frame: object) -> None:
        try:
            call()
        except Exception as error:
            raised.append(error)

    handler(run)
    return raised


def test_a_publisher_or_subscriber_that_interrupts_itself_says_so(
    handler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"w": torch.ones(3)}
    sampler = {"w": torch.zeros(3)}
    with Publisher(tmp_path) as publisher, Subscriber(tmp_path, sampler) as subscriber:
        raised = raised_by_handler(handler, lambda: publisher.publish_delta(weights, 2))
        with monkeypatch.context() as patch:
            patch.setattr(publisher, "_open", interrupting(publisher._open))
            publisher.publish_delta(weights, 1)
        raised += raised_by_handler(handler, subscriber.apply_delta)
        raised_there = raised_by_handler(handler, subscriber.apply_delta)
        with monkeypatch.context() as patch:
            patch.setattr(subscriber, "_bring", interrupting(subscriber._bring))
            assert subscriber.apply_delta() is not None
        found = [(type(error), str(error)) for error in raised + raised_there]
        assert [kind for kind, _ in found] == [RuntimeError] * 2
        assert "publishing" in found[0][1] and "updating" in found[1][1]
        assert sampler["w"].eq(1).all()


def test_waiting_for_something_new_keeps_nobody_out(tmp_path: Path) -> None:
    """Also a signal handler may update the weights meanwhile; and nothing old is brought back."""
    weights, sampler = {"w": torch.zeros(3)}, {"w": torch.full((3,), 9.0)}
    with Publisher(tmp_path) as publisher, Subscriber(tmp_path, sampler) as subscriber:
        publisher.publish_delta(weights, 0)
        assert subscriber.apply_delta() is not None
        entries = subscriber._source.entries
        waits, goes_on = threading.Event(), threading.Event()

        def slow(after: str | None, wait: float) -> Any:
            if not wait:
                return entries(after, wait)
            found = entries(None, 0.0)
            waits.set()
            assert goes_on.wait(60)
            return found

        subscriber._source.entries = slow  # type: ignore[method-assign]
        publisher.publish_delta({"w": torch.ones(3)}, 1)
        waiting = threading.Thread(target=lambda: subscriber.apply_delta(wait=60))
        waiting.start()
        assert waits.wait(60)
        publisher.publish_delta({"w": torch.full((3,), 2.0)}, 2)
        assert subscriber.apply_delta() is not None and subscriber.step == 2
        goes_on.set()
        waiting.join(60)
        assert subscriber.step == 2 and sampler["w"].eq(2).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_does_not_wait_for_the_parents_threads(tmp_path: Path) -> None:
    sampler = {"w": torch.zeros(3)}
    publisher, subscriber = Publisher(tmp_path), Subscriber(tmp_path, sampler)
    publisher.publish_delta({"w": torch.ones(3)}, 1)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with publisher._turn.take(), subscriber._turn.take():
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(120)  # Ends a child that waits.
        try:
            logging.disable()
            publisher.publish_delta({"w": torch.full((3,), 2.0)}, 2)
            assert subscriber.apply_delta() is not None and sampler["w"].eq(2).all()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    done.set()
    thread.join()
