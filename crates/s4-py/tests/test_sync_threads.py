"""Several threads that apply what is published to the same weights."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from s4weights import CheckpointStore, CorruptDataError
from s4weights.sync import Publisher, Subscriber


def test_each_of_several_threads_waits_as_long_as_it_was_told() -> None:
    trainer, weights = {"w": torch.randn(100)}, {"w": torch.zeros(100)}
    with (
        Publisher("memory:", listen="tcp://127.0.0.1:0") as publisher,
        Subscriber(publisher.address or "", weights) as subscriber,
    ):
        publisher.publish_delta(trainer, 0)
        assert subscriber.apply_delta() is not None
        found: list[int] = []

        def wait() -> None:
            done = subscriber.apply_delta(wait=200.0)
            found.append(-1 if done is None else done.step)

        threads = [threading.Thread(target=wait) for _ in range(2)]
        for thread in threads:
            thread.start()
        for step in (1, 2):
            trainer["w"][step] += 1
            publisher.publish_delta(trainer, step)
            end = time.monotonic() + 100
            while len(found) < step and time.monotonic() < end:
                time.sleep(0.01)
            time.sleep(0.2)
            assert found == [1, 2][:step]
        for thread in threads:
            thread.join(60)


def test_whoever_enters_in_the_middle_of_an_update_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, weights = {"w": torch.randn(100)}, {"w": torch.zeros(100)}
    with (
        Publisher("memory:", listen="tcp://127.0.0.1:0") as publisher,
        Subscriber(publisher.address or "", weights) as subscriber,
    ):
        publisher.publish_delta(trainer, 0)
        begun, goes_on, apply = threading.Event(), threading.Event(), subscriber._weights.read

        def slow(reader: Any) -> None:
            begun.set()
            assert goes_on.wait(60)
            apply(reader)

        monkeypatch.setattr(subscriber._weights, "read", slow)
        first = threading.Thread(target=subscriber.apply_delta)
        first.start()
        assert begun.wait(60) and subscriber.step is None
        threading.Timer(0.2, goes_on.set).start()
        start = time.monotonic()
        assert subscriber.apply_delta(wait=0.6) is None
        assert goes_on.is_set() and time.monotonic() - start > 0.55
        first.join(60)


def test_a_publisher_that_cannot_read_its_store_does_not_keep_the_address(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        store.save_checkpoint({"w": torch.ones(3)}, 1)
    (tmp_path / "repo.json").write_text("garbage")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for address in (f"tcp://127.0.0.1:{port}", f"unix://{tmp_path}/socket"):
        for _ in range(2):
            with pytest.raises(CorruptDataError, match=r"repo\.json"):
                Publisher(tmp_path, listen=address)
    assert not (tmp_path / "socket").exists()
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", port), timeout=5.0):
        pass
