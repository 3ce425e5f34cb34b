"""Weights that one process publishes and others apply."""

from __future__ import annotations

import errno
import http.server
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from in_time import in_time
from s4weights.sync import Publisher, Subscriber, Update

EXAMPLE = Path(__file__).parents[3] / "examples/weight_sync.py"


class Model(torch.nn.Module):
    """Tied weights, a buffer that is not in the state, and tensors that share chunks."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(300, 512, generator=generator) * 0.02
        self.embed = torch.nn.Parameter(values.to(torch.bfloat16))
        self.head = self.embed
        self.inner = torch.nn.Linear(512, 200, dtype=torch.bfloat16)
        self.norm = torch.nn.Parameter(torch.ones(512))
        self.register_buffer("scratch", torch.zeros(9), persistent=False)

    def train_step(self, step: int) -> None:
        """Changes some weights by the last bit, and all values of the norm."""
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for values in (self.embed, self.inner.weight):
                chosen = torch.rand(values.shape, generator=generator) < 0.003
                bits = values.view(torch.int16)
                bits[chosen] ^= 1
            self.norm += 1e-3


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    there = b.state_dict()
    return all(
        torch.equal(tensor.view(torch.uint8), there[name].contiguous().view(torch.uint8))
        for name, tensor in a.state_dict().items()
    )


def update(subscriber: Subscriber, **how: Any) -> Update:
    done = subscriber.apply_delta(**how)
    assert done is not None
    return done


@pytest.fixture(params=["folder", "tcp", "unix"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Publisher, str]]:
    """A publisher, and the source that its subscribers use."""
    address = {"folder": None, "tcp": "tcp://127.0.0.1:0", "unix": f"unix://{tmp_path}/sync.sock"}
    listen = address[request.param]
    place = str(tmp_path / "weights") if listen is None else "memory:"
    with Publisher(place, listen=listen, chain=4) as publisher:
        yield publisher, publisher.address or place


def test_every_step_is_applied_in_place(pair: tuple[Publisher, str]) -> None:
    publisher, source = pair
    trainer, sampler = Model(), Model(seed=1)
    places = {name: t.data_ptr() for name, t in sampler.state_dict().items()}
    with Subscriber(source, sampler) as subscriber:
        assert subscriber.apply_delta() is None and subscriber.step is None
        for step in range(6):
            if step:
                trainer.train_step(step)
            entry = publisher.publish_delta(trainer, step)
            version = sampler.embed._version
            done = update(subscriber, wait=20.0)
            assert same(trainer, sampler), f"step {step}"
            assert sampler.embed._version > version
            assert (done.step, done.id, done.raw_bytes) == (step, entry.id, entry.raw_bytes)
            assert done.bytes == entry.bytes and subscriber.step == step
            # The fifth step is a new base.
            is_base = step % 4 == 0
            assert (entry.kind == "base") == is_base
            assert (done.deltas, done.why_base is None) == ((0, False) if is_base else (1, True))
            if not is_base:
                assert entry.bytes < entry.raw_bytes / 10
            assert subscriber.apply_delta() is None
    assert {name: t.data_ptr() for name, t in sampler.state_dict().items()} == places
    live = {tensor.data_ptr() for tensor in subscriber._weights._places.values()}
    assert live == set(places.values()), "and nothing was decoded elsewhere"


def test_a_subscriber_that_missed_steps_goes_on_through_the_chain(
    pair: tuple[Publisher, str],
) -> None:
    publisher, source = pair
    trainer, sampler, late = Model(), Model(seed=1), Model(seed=2)
    with Subscriber(source, sampler) as subscriber, Subscriber(source, late) as other:
        publisher.publish_delta(trainer, 0)
        update(subscriber)
        sizes = []
        for step in (1, 2, 3):
            trainer.train_step(step)
            sizes.append(publisher.publish_delta(trainer, step).bytes)
        done = update(subscriber)
        assert (done.step, done.deltas, done.why_base, done.bytes) == (3, 3, None, sum(sizes))
        assert same(trainer, sampler)
        # A subscriber that comes later starts from the base of the chain.
        done = update(other)
        assert done.deltas == 0 and done.why_base == "no weights were loaded before"
        assert same(trainer, late)
        # So does one that missed the end of its chain.
        for step in (4, 5):
            trainer.train_step(step)
            publisher.publish_delta(trainer, step)
        done = update(other)
        assert done.why_base == "step 3 is not in the chain of step 5" and same(trainer, late)
        # Back to an older step, and forth again.
        kept = Model()
        kept.load_state_dict(trainer.state_dict())
        assert update(subscriber, step=1).step == 1 and not same(trainer, sampler)
        assert update(subscriber).step == 5 and same(kept, sampler)
        with pytest.raises(s4weights.NotFoundError, match="step 77"):
            subscriber.apply_delta(step=77)
        assert same(kept, sampler) and subscriber.step == 5


def test_weights_that_were_changed_meanwhile_heal(
    pair: tuple[Publisher, str], caplog: pytest.LogCaptureFixture
) -> None:
    publisher, source = pair
    trainer, sampler = Model(), Model(seed=1)
    with Subscriber(source, sampler) as subscriber:
        publisher.publish_delta(trainer, 0)
        update(subscriber)
        with torch.no_grad():
            sampler.inner.weight[3, 3] += 1
        trainer.train_step(1)
        publisher.publish_delta(trainer, 1)
        with caplog.at_level(logging.WARNING, "s4weights"):
            done = update(subscriber)
        assert done.why_base is not None and "did not match step 0" in done.why_base
        assert "reading all weights again" in caplog.text and same(trainer, sampler)
        trainer.train_step(2)
        publisher.publish_delta(trainer, 2)
        assert update(subscriber).deltas == 1 and same(trainer, sampler)


def test_another_model_is_refused_and_left_alone(pair: tuple[Publisher, str]) -> None:
    publisher, source = pair
    publisher.publish_delta(Model(), 0)
    other = torch.nn.Linear(4, 4)
    before = other.weight.clone()
    with (
        Subscriber(source, other) as subscriber,
        pytest.raises(s4weights.MismatchError, match="embed"),
    ):
        subscriber.apply_delta()
    assert torch.equal(other.weight, before)


def test_a_new_layer_ends_the_chain_for_subscribers(tmp_path: Path) -> None:
    with Publisher(tmp_path) as publisher:
        weights = {"a": torch.randn(200, 200), "b": torch.randn(9000)}
        target = {name: torch.zeros_like(t) for name, t in weights.items()}
        subscriber = Subscriber(tmp_path, target)
        publisher.publish_delta(weights, 0)
        update(subscriber)
        weights["c"] = torch.randn(5000)
        assert publisher.publish_delta(weights, 1).kind == "delta"
        with pytest.raises(s4weights.MismatchError, match="`c`"):
            subscriber.apply_delta()
        target["c"] = torch.zeros(5000)
        done = update(subscriber)
        assert done.why_base is not None and torch.equal(target["c"], weights["c"])
        assert torch.equal(target["a"], weights["a"])


def test_tensors_that_cannot_be_decoded_in_place(tmp_path: Path) -> None:
    base = torch.randn(90, 70)
    trainer = {"w": base.clone(), "view": base.clone()[:, 3:40], "one": torch.tensor(3.0)}
    sampler = {
        "w": torch.zeros(70, 90).T,
        "view": torch.zeros(90, 37),
        "one": torch.tensor(0.0),
    }
    with Publisher(tmp_path) as publisher, Subscriber(tmp_path, sampler) as subscriber:
        for step in range(3):
            publisher.publish_delta(trainer, step)
            assert update(subscriber).deltas == min(step, 1)
            assert all(torch.equal(sampler[name], trainer[name]) for name in trainer)
            trainer["w"][step, 5] += 1
            trainer["view"][7] *= 2
            trainer["one"] += 1


def test_it_publishes_in_the_background(tmp_path: Path) -> None:
    trainer, sampler = Model(), Model(seed=1)
    listen = f"unix://{tmp_path}/s.sock"
    with (
        Publisher(tmp_path / "w", listen=listen) as publisher,
        Subscriber(listen, sampler) as subscriber,
    ):
        publisher.publish_delta(trainer, 0)
        update(subscriber)
        kept = Model()
        for step in (1, 2):
            trainer.train_step(step)
            kept.load_state_dict(trainer.state_dict())
            pending = publisher.publish_delta(trainer, step, blocking=False)
            with torch.no_grad():
                trainer.embed.add_(1)  # The published values are those at the call.
            started = time.monotonic()
            assert update(subscriber, wait=200.0).step == step
            assert time.monotonic() - started < 150
            assert pending.wait().step == step and same(kept, sampler)
            trainer.load_state_dict(kept.state_dict())


def test_a_pickle_is_refused(tmp_path: Path) -> None:
    with s4weights.CheckpointStore(tmp_path) as store:
        store.save_checkpoint({"w": torch.ones(3), "code": print}, 0)
    weights = {"w": torch.zeros(3)}
    with Subscriber(tmp_path, weights) as subscriber, pytest.raises(s4weights.UnsafeLoadError):
        subscriber.apply_delta()
    assert not weights["w"].any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chain": 1}, "chain=1"),
        ({"chain": 65}, "chain=65"),
        ({"max_hops": 2}, "max_hops"),
        ({"listen": "http://x"}, "tcp://host:port"),
        ({"listen": "unix://relative/x"}, "unix:///path"),
        ({"listen": "tcp://127.0.0.1:99999"}, "tcp://host:port"),
    ],
)
def test_arguments_that_make_no_sense(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Publisher(tmp_path, **arguments)
    with pytest.raises(ValueError, match="no tensors"), Publisher(tmp_path) as publisher:
        publisher.publish_delta({"x": 1}, 0)
    with (
        s4weights.CheckpointStore(tmp_path) as store,
        pytest.raises(ValueError, match="line of deltas"),
    ):
        Publisher(store)
    with pytest.raises(TypeError, match="runner"):
        Publisher(tmp_path, runner="unix:///s")


class Other(torch.Tensor):
    """A class of tensors that may stand for anything, as DTensors do."""


def test_only_plain_tensors_are_published(tmp_path: Path) -> None:
    weights = {"a": torch.ones(2), "b": torch.ones(3).as_subclass(Other)}
    with Publisher(tmp_path) as publisher, pytest.raises(ValueError, match="`b` is a Other: only"):
        publisher.publish_delta(weights, 0)


def test_why_tensors_cannot_be_published(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)
    cases = {
        "on the device meta": torch.ones(2, device="meta"),
        "quantized (qint8)": quantized,
        "of layout sparse_coo": torch.ones(2).to_sparse(),
    }
    with Publisher(tmp_path) as publisher:
        for what, tensor in cases.items():
            with pytest.raises(ValueError, match=re.escape(f"`w` is {what}: it cannot")):
                publisher.publish_delta({"w": tensor}, 0)


def test_a_path_that_is_too_long_for_a_socket_is_named(tmp_path: Path) -> None:
    with pytest.raises(s4weights.StorageError, match=r"cannot listen: .*too long"):
        Publisher("memory:", listen=f"unix://{tmp_path}/{'x' * 200}")


def test_what_is_damaged_on_the_way_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, sampler = Model(), Model(seed=1)
    with (
        Publisher("memory:", listen="tcp://127.0.0.1:0") as publisher,
        Subscriber(publisher.address or "", sampler) as subscriber,
    ):
        publisher.publish_delta(trainer, 0)
        update(subscriber)
        before = Model()
        before.load_state_dict(sampler.state_dict())
        trainer.train_step(1)
        publisher.publish_delta(trainer, 1)
        server = publisher._server
        assert server is not None
        stored = server._stored

        def damaged(id: str) -> tuple[bytes, list[bytes]]:
            index, objects = stored(id)
            middle = len(objects[0]) // 2
            objects[0] = objects[0][:middle] + b"\xff\x00" + objects[0][middle + 2 :]
            return index, objects

        monkeypatch.setattr(server, "_stored", damaged)
        with pytest.raises(s4weights.CorruptDataError, match="does not match the index"):
            subscriber.apply_delta()
        assert same(before, sampler) and subscriber.step == 0
        monkeypatch.setattr(server, "_kept", None)
        monkeypatch.setattr(server, "_stored", stored)
        assert update(subscriber).deltas == 1 and same(trainer, sampler)


def test_memory_does_not_grow_with_the_steps() -> None:
    weights = {"w": torch.randn(50_000)}
    with Publisher("memory:", listen="tcp://127.0.0.1:0", chain=2) as publisher:
        for step in range(9):
            weights["w"][step] += 1
            publisher.publish_delta(weights, step)
        store = publisher._store
        assert store is not None
        # The newest chain, and what retention keeps of the one before.
        listed = store.list()
        assert len(listed) <= 4 and listed[-1].step == 8
        found = store.gc(dry_run=True, grace=0, exclusive=True)
        assert sum(item["bytes"] for item in found["deleted"] + found["given_up"]) < 200_000


def test_memory_is_swept_while_no_save_is_running(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"w": torch.randn(50_000)}
    with Publisher("memory:", chain=2) as publisher:
        swept: list[tuple[bool, bool]] = []
        sweep = publisher._sweep

        def watched(store: s4weights.CheckpointStore) -> None:
            pending = store._pending
            if publisher._sweeps:
                swept.append((publisher._turn.is_mine(), pending is not None and pending.done()))
            sweep(store)

        monkeypatch.setattr(publisher, "_sweep", watched)
        for step in range(9):
            weights["w"][step] += 1
            publisher.publish_delta(weights, step, blocking=False)
        publisher.publish_delta(weights, 9)
        assert swept == [(True, True)] * 5
        found = publisher._open(0).gc(dry_run=True, grace=0, exclusive=True)
        assert sum(item["bytes"] for item in found["deleted"] + found["given_up"]) < 200_000


def test_what_is_published_stays_published_if_nobody_can_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Publisher(tmp_path, listen="tcp://127.0.0.1:0") as publisher:
        server = publisher._server
        assert server is not None

        def fail() -> None:
            raise s4weights.StorageError(5, "no answer")

        with monkeypatch.context() as patch:
            patch.setattr(server, "_list", fail)
            assert publisher.publish_delta({"w": torch.ones(9)}, 1).step == 1
        assert "could not notify subscribers of step 1" in caplog.text
        publisher.publish_delta({"w": torch.ones(9)}, 2)
        assert [entry.step for entry in server.entries(None, 1.0)] == [1, 2]


#: What a publisher answers, if ids were other texts.
LISTED = json.dumps(
    [
        {
            "step": 0, "id": "i d", "bytes": 1234, "raw_bytes": 9, "kind": "base", "parent": None,
            "since_base": 0, "metrics": {}, "tags": {}, "pinned": False, "time": 0.0,
        }
    ]
).encode()  # fmt: skip


@pytest.mark.parametrize(
    ("length", "body", "message"),
    [
        (1 << 50, b"[", "the response has 1125899906842624 bytes"),
        (2, b"{}", "not a list of checkpoints"),
        (4, b"[{}]", "not a list of checkpoints"),
        (len(LISTED), LISTED.replace(b"1234", b"null"), "not a list of checkpoints"),
        (len(LISTED) - 1, LISTED.replace(b"1234", b"-12"), "not a list of checkpoints"),
        (len(LISTED) + 1, LISTED.replace(b'"i d"', b"[1234]"), "not a list of checkpoints"),
        (100_000, b"[" * 100_000, "not a list of checkpoints"),
        (None, b"[]", "the response has None bytes"),
    ],
)
def test_a_server_that_lies_is_not_believed(length: int | None, body: bytes, message: str) -> None:
    class Liar(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            if length is not None:
                self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Liar) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"tcp://127.0.0.1:{server.server_address[1]}"
        weights = {"w": torch.zeros(3)}
        with pytest.raises(s4weights.CorruptDataError, match=message):
            Subscriber(address, weights).apply_delta()
        server.shutdown()


def test_a_publisher_that_is_gone_is_a_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, trainer = {"w": torch.zeros(5000)}, {"w": torch.randn(5000)}
    listen = f"unix://{tmp_path}/s.sock"
    with Publisher(tmp_path / "w", listen=listen) as publisher:
        publisher.publish_delta(trainer, 1)
        subscriber = Subscriber(listen, weights)
        update(subscriber)
    with monkeypatch.context() as patch:
        patch.setattr(subscriber._source, "_timeout", 0.5)
        with pytest.raises(s4weights.StorageError, match="does not respond"):
            subscriber.apply_delta()
    # A publisher that takes its place serves what is stored, and goes on where the first one stopped.
    with Publisher(tmp_path / "w", listen=listen) as publisher:
        late = {"w": torch.zeros(5000)}
        assert update(Subscriber(listen, late)).step == 1
        assert torch.equal(late["w"], trainer["w"])
        trainer["w"][7] += 1
        assert publisher.publish_delta(trainer, 2).kind == "delta"
        assert update(subscriber).deltas == 1 and torch.equal(weights["w"], trainer["w"])


def test_a_silent_publisher_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        subscriber = Subscriber(address, {"w": torch.zeros(3)}, timeout=0.5)

        def give_up() -> None:
            with pytest.raises(s4weights.StorageError, match="does not respond") as caught:
                subscriber.apply_delta(wait=0.5)
            assert caught.value.errno == errno.ETIMEDOUT

        in_time(10, give_up)


def test_whoever_waited_for_a_publication_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, weights = {"w": torch.randn(100)}, {"w": torch.zeros(100)}
    with (
        Publisher("memory:", listen="tcp://127.0.0.1:0") as publisher,
        Subscriber(publisher.address or "", weights) as subscriber,
    ):
        server = publisher._server
        assert server is not None
        refresh = server.refresh

        def slow() -> None:
            time.sleep(0.2)
            refresh()

        monkeypatch.setattr(server, "refresh", slow)
        for step in range(3):
            trainer["w"][step] += 1
            publisher.publish_delta(trainer, step, blocking=False).wait()
            assert update(subscriber).step == step and torch.equal(weights["w"], trainer["w"])


def test_a_store_outlives_its_publisher(tmp_path: Path) -> None:
    with s4weights.CheckpointStore(tmp_path, max_chain=4, max_hops=3) as store:
        with Publisher(store, listen="tcp://127.0.0.1:0") as publisher:
            publisher.publish_delta({"w": torch.ones(9)}, 0)
            server = publisher._server
            # What is saved without the publisher is served as well.
            store.save_checkpoint({"w": torch.ones(9)}, 1)
            assert server is not None and [e.step for e in server.entries(None, 0)] == [0, 1]
        store.save_checkpoint({"w": torch.ones(9)}, 2)
        assert not store._on_saved and [e.step for e in server.entries(None, 0)] == [0, 1]


def test_a_trainer_and_two_samplers_as_processes() -> None:
    command = [sys.executable, str(EXAMPLE), "--socket", "--values", "200000", "--steps", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sampler 1: step 3: 2 deltas" in done.stdout, done.stdout
    assert done.stdout.count("bit for bit") == 2, done.stdout


def test_conjugated_and_negated_views_are_published_by_their_values(tmp_path: Path) -> None:
    c = torch.tensor([1 + 2j, 3 - 4j])
    weights = {"c": c.conj(), "i": c.conj().imag, "plain": c}
    target = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    with Publisher(tmp_path) as publisher, Subscriber(tmp_path, target) as subscriber:
        publisher.publish_delta(weights, 0)
        update(subscriber)
        assert all(torch.equal(target[name], weights[name]) for name in weights)
        c += 1
        publisher.publish_delta(weights, 1)
        update(subscriber)
        assert all(torch.equal(target[name], weights[name]) for name in weights)


def test_weights_of_inference_mode_are_filled(tmp_path: Path) -> None:
    with torch.inference_mode():
        target = {"w": torch.zeros(2, 3).t()}
    with Publisher(tmp_path) as publisher, Subscriber(tmp_path, target) as subscriber:
        publisher.publish_delta({"w": torch.ones(3, 2)}, 0)
        update(subscriber)
    assert target["w"].all()


def _assigned(model: Model) -> None:
    copies = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(copies, assign=True)


def _turned(model: Model) -> None:
    model.inner.weight.data = model.inner.weight.data.T.contiguous().T


def _moved(model: Model) -> None:
    # The old parameter still has its memory, which is the subscriber's no longer.
    model.norm = torch.nn.Parameter(torch.zeros(512))


@pytest.mark.parametrize("change", [_assigned, _turned, _moved])
def test_tensors_that_were_replaced_are_filled(tmp_path: Path, change: Any) -> None:
    trainer, sampler = Model(), Model(seed=1)
    with Publisher(tmp_path) as publisher, Subscriber(tmp_path, sampler) as subscriber:
        publisher.publish_delta(trainer, 0)
        update(subscriber)
        before = {name: (t, t.clone()) for name, t in sampler.state_dict().items()}
        change(sampler)
        now = {t.data_ptr() for t in sampler.state_dict().values()}
        trainer.train_step(1)
        publisher.publish_delta(trainer, 1)
        done = update(subscriber)
        assert same(trainer, sampler) and done.why_base == "tensors were replaced, converted or moved"
        for tensor, values in before.values():
            assert tensor.data_ptr() in now or torch.equal(tensor, values), "others are left alone"
        trainer.train_step(2)
        publisher.publish_delta(trainer, 2)
        assert update(subscriber).deltas == 1 and same(trainer, sampler)
        # Also if nothing new was published.
        assert subscriber.apply_delta() is None
        sampler.load_state_dict(Model(seed=2).state_dict(), assign=True)
        assert update(subscriber).step == 2 and same(trainer, sampler)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.half(), r"`embed` is torch.float16 .*, but torch.bfloat16 .* in the file"),
        (lambda model: model.float(), "`embed` is torch.float32"),
        (lambda model: model.to("meta"), "has no memory"),
        (
            lambda model: setattr(model.norm, "data", torch.zeros(16, 32)),
            r"`norm` is torch.float32 \[16, 32\]",
        ),
        (
            lambda model: setattr(model.norm, "data", torch.zeros(1).expand(512)),
            "`norm` has several elements at the same memory location",
        ),
        (
            lambda model: [p.untyped_storage().resize_(0) for p in model.parameters()],
            "`embed` .*memory was freed.*`head` .*memory was freed",
        ),
        (lambda model: delattr(model, "norm"), "`norm` is only in the file"),
    ],
)
def test_tensors_that_fit_no_longer_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    trainer, sampler = Model(), Model(seed=1)
    with Publisher(tmp_path) as publisher, Subscriber(tmp_path, sampler) as subscriber:
        publisher.publish_delta(trainer, 0)
        update(subscriber)
        change(sampler)
        there = [p for p in sampler.parameters() if p.untyped_storage().nbytes() and not p.is_meta]
        before = [p.detach().clone() for p in there]
        for step in (1, 2):
            trainer.train_step(step)
            publisher.publish_delta(trainer, step)
            with pytest.raises(s4weights.MismatchError, match=message):
                subscriber.apply_delta()
            assert subscriber.step is None
            assert all(torch.equal(p, values) for p, values in zip(there, before, strict=True))


def test_memory_that_comes_back_is_filled(tmp_path: Path) -> None:
    """As in samplers that give up their weights' memory while they sleep."""
    trainer, sampler = Model(), Model(seed=1)
    storages = {p.untyped_storage(): p.nbytes for p in sampler.parameters()}
    with Publisher(tmp_path) as publisher, Subscriber(tmp_path, sampler) as subscriber:
        publisher.publish_delta(trainer, 0)
        update(subscriber)
        for storage in storages:
            storage.resize_(0)
        with pytest.raises(s4weights.MismatchError, match="memory was freed"):
            subscriber.apply_delta()
        for storage, nbytes in storages.items():
            storage.resize_(nbytes)
        update(subscriber)
        assert same(trainer, sampler)


def test_a_parameter_made_anew_from_the_same_memory_counts_its_changes(tmp_path: Path) -> None:
    trainer, sampler = Model(), Model(seed=1)
    with Publisher(tmp_path) as publisher, Subscriber(tmp_path, sampler) as subscriber:
        publisher.publish_delta(trainer, 0)
        update(subscriber)
        old = sampler.norm
        sampler.norm = torch.nn.Parameter(old.data)
        old.data = kept = torch.zeros(512)
        version = sampler.norm._version
        trainer.train_step(1)
        publisher.publish_delta(trainer, 1)
        assert update(subscriber).deltas == 1 and same(trainer, sampler)
        assert sampler.norm._version > version and not kept.any()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:0", "unix"])
def test_a_child_does_not_keep_the_address(tmp_path: Path, listen: str) -> None:
    listen = f"unix://{tmp_path}/s.sock" if listen == "unix" else listen
    publisher = Publisher(tmp_path / "store", listen=listen)
    publisher.publish_delta({"w": torch.ones(2)}, 1)
    address = publisher.address
    assert address is not None
    said, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            publisher.close()  # The parent's: this neither waits nor ends it.
            os.write(told, b".")
            time.sleep(600)
        finally:
            os._exit(0)
    os.close(told)
    try:
        assert os.read(said, 1) == b"."
        weights = {"w": torch.zeros(2)}
        with Subscriber(address, weights, timeout=60) as subscriber:
            assert subscriber.apply_delta() is not None
        publisher.close()
        with Publisher(tmp_path / "store", listen=address) as again:
            again.publish_delta({"w": torch.ones(2)}, 2)
            with Subscriber(address, weights, timeout=60) as subscriber:
                assert subscriber.apply_delta() is not None
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(said)
