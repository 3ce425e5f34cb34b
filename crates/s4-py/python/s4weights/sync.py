"""Sends the weights of a running trainer to processes that sample from them. Only changes are
transferred, and they are applied in place.

The trainer publishes to a store in a folder or a bucket, and can also serve it over a socket::

    from s4weights.sync import Publisher, Subscriber

    with Publisher("s3://bucket/weights", listen="tcp://0.0.0.0:8476") as publisher:
        for step in range(steps):
            ...
            publisher.publish_delta(model, step)

A sampler fetches updates whenever its weights are not in use::

    subscriber = Subscriber("tcp://trainer:8476", model)     # or "s3://bucket/weights"
    while True:
        subscriber.apply_delta(wait=1.0)
        ...

Each checkpoint except a base is a delta of the previous one. A subscriber that missed some of them
applies all that follow the one it has. If it has no checkpoint of the chain, or its values turn out
to be different, it starts from the chain's base.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, overload

from . import _core, _live
from ._device import Compute
from ._entries import CheckpointEntry, Retention, checked_step
from ._errors import CorruptDataError, NotFoundError, S4Error
from ._pending import PendingSave
from ._report import Recorder
from ._sources import check_seconds, check_threads
from ._staging import Stage
from ._store import CheckpointStore
from ._sync_live import LiveWeights, tensors_of
from ._sync_socket import Client, Server, is_address
from ._turn import Turn

__all__ = ["Publisher", "Subscriber", "Update"]

logger = logging.getLogger("s4weights")

#: Checkpoints that share a base, the base included.
CHAIN = 32
#: The longest chain that the format has.
_MOST_CHAIN = 64
#: Bytes allowed for a checkpoint in addition to its values.
_OVERHEAD = 64 << 20
#: Seconds between two queries of a store.
_POLL = 0.5

#: Those whose turn a fork resets: in the child, nobody would end what another thread was doing.
_forked: weakref.WeakSet[Publisher | Subscriber] = weakref.WeakSet()


def _in_child() -> None:
    for one in _forked:
        one._turn = Turn()


_live.at_fork(_in_child)


class Publisher:
    """Publishes weights step by step, as deltas of the previous step.

    Any thread may call it; only one step is published at a time.

    Args:
        store: a folder, a URL or a `CheckpointStore`. With ``"memory:"``, weights are only
            available through the socket.
        listen: the address at which to serve published weights: ``tcp://host:port`` (port 0 means any
            free port) or ``unix:///path``. Anyone who can connect is served: there is no encryption
            and no authentication.
        chain: number of checkpoints that share a base, 2 to 64. The base is as large as a full
            copy; a new subscriber decodes it and the deltas that follow it.
        options: arguments of `CheckpointStore`, if ``store`` is not one. By default, the newest
            chain and the previous one stay listed, and the values that the next delta needs are
            kept in host memory.

    Raises:
        StorageError: it cannot listen at the address.
    """

    def __init__(
        self,
        store: CheckpointStore | str | os.PathLike[str],
        *,
        listen: str | None = None,
        chain: int = CHAIN,
        **options: Any,
    ) -> None:
        if type(chain) is not int or not 2 <= chain <= _MOST_CHAIN:
            raise ValueError(f"chain={chain!r}: expected 2 to {_MOST_CHAIN}")
        self._own = not isinstance(store, CheckpointStore)
        self._is_private = False
        self._process = os.getpid()
        if isinstance(store, CheckpointStore):
            if options:
                raise TypeError(f"{', '.join(options)}: not allowed with an existing store")
            hops, shared = store._arguments["max_hops"], store._arguments["max_chain"]
            if hops is None or shared is None or hops < shared - 1:
                raise ValueError("store: expected max_hops=max_chain - 1, for a line of deltas")
            if store.runner is not None:
                raise ValueError("store: it has a runner, which would decide which checkpoints are deltas")
            self._store: CheckpointStore | None = store
        else:
            given = {"max_chain", "max_hops"} & options.keys()
            if options.get("runner") is not None:
                raise TypeError("runner: not supported, as it would decide which checkpoints are deltas")
            if given:
                raise TypeError(f"{', '.join(given)}: not allowed; use `chain` instead")
            self._store = None
            self._arguments = {
                "retention": Retention(keep_last=chain + 1),
                **options,
                "max_chain": chain,
                "max_hops": chain - 1,
            }
            self._url = os.fspath(store)
            self._is_private = self._url == "memory:"
            if self._is_private:
                # Within a process, the same name means the same store.
                self._url = f"memory:///{uuid.uuid4()}"
            if "parent_memory" in options:
                self._open(0)
        self._turn = Turn()
        _forked.add(self)
        self._closed = False
        #: Whether a base was published, and the checkpoints that it replaces are still stored.
        self._sweeps = False
        self._server: Server | None = None
        #: The store as an earlier publisher left it, served until this one publishes.
        self._earlier: CheckpointStore | None = None
        if listen is not None:
            if not isinstance(listen, str):
                raise TypeError(f"listen={listen!r}: expected an address such as tcp://host:port")
            if self._store is None and not self._is_private:
                self._earlier = self._read_only()
            self._server = Server(listen, self._entries, self._stored)
        if isinstance(store, CheckpointStore):
            store._on_saved.append(self._published)

    @property
    def address(self) -> str | None:
        """The address that it listens at, with the actual port, or ``None`` if it does not listen."""
        return None if self._server is None else self._server.address

    @overload
    def publish_delta(
        self,
        weights: object,
        step: int,
        *,
        base: bool = ...,
        metrics: Mapping[str, float] | None = ...,
        tags: Mapping[str, str] | None = ...,
        blocking: Literal[True] = ...,
        stage: Stage = ...,
    ) -> CheckpointEntry: ...

    @overload
    def publish_delta(
        self,
        weights: object,
        step: int,
        *,
        base: bool = ...,
        metrics: Mapping[str, float] | None = ...,
        tags: Mapping[str, str] | None = ...,
        blocking: Literal[False],
        stage: Stage = ...,
    ) -> PendingSave: ...

    def publish_delta(
        self,
        weights: object,
        step: int,
        *,
        base: bool = False,
        metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        blocking: bool = True,
        stage: Stage = "auto",
    ) -> CheckpointEntry | PendingSave:
        """Publish weights. Subscribers see them completely or not at all.

        Args:
            weights: a module, or containers of tensors. Other values are ignored.
            step: the training step, a non-negative integer.
            base: publish a base instead of a delta.
            metrics: as in `CheckpointStore.save_checkpoint`, as are ``tags``, ``blocking`` and
                ``stage``.

        Returns:
            The entry, whose ``bytes`` are the size transferred to subscribers, or a `PendingSave`
            if ``blocking=False``.

        Raises:
            S4Error: as in `CheckpointStore.save_checkpoint`.
            ValueError: there are no tensors, or one is not a plain tensor, for example a DTensor.
            RuntimeError: it is called by a signal handler that interrupted this publisher.
        """
        if self._turn.is_mine():
            raise RuntimeError("this thread is already publishing: a signal handler cannot do so, too")
        tensors = tensors_of(weights)
        with self._turn.take():
            if self._closed:
                raise ValueError("the publisher is closed")
            store = self._open(sum(tensor.nbytes for tensor in tensors.values()))
            how: dict[str, Any] = {"base": base, "metrics": metrics, "tags": tags}
            if self._is_private:
                # A sweep would delete what a save that is running has uploaded so far.
                store._settle()
                self._sweep(store)
            if blocking:
                entry: CheckpointEntry = store.save_checkpoint(tensors, step, **how)
                self._sweep(store)
                return entry
            return store.save_checkpoint(tensors, step, blocking=False, stage=stage, **how)

    def close(self) -> None:
        """Close the store, if the publisher opened it, and then the socket. Closing the store waits
        for the running publication.
        """
        self._closed = True
        try:
            if self._store is not None and self._own:
                self._store.close()
        finally:
            if self._server is not None:
                self._server.close()
            if self._earlier is not None:
                self._earlier.close()
            if self._store is not None:
                with contextlib.suppress(ValueError):  # It was removed already.
                    self._store._on_saved.remove(self._published)
                if self._is_private and self._process == os.getpid():
                    self._is_private = False
                    self._empty()

    def _empty(self) -> None:
        """Delete the contents of the store in memory, which nobody else can reach."""
        with contextlib.suppress(S4Error), CheckpointStore(self._url) as store:
            native = store._open("open")
            native.retire([entry.id for entry in store.list()], "closed")
            native.sweep(0.0, True, False)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self, nbytes: int) -> CheckpointStore:
        """The store. It keeps ``nbytes`` of values in memory, which the next delta needs."""
        if self._store is None:
            arguments = {"parent_memory": nbytes + _OVERHEAD, **self._arguments}
            self._store = CheckpointStore(self._url, **arguments)
            self._store._on_saved.append(self._published)
        return self._store

    def _read_only(self) -> CheckpointStore:
        names = ("storage_options", "threads", "timeout", "allow_network_fs")
        given = {name: self._arguments[name] for name in names if name in self._arguments}
        return CheckpointStore(self._url, read_only=True, **given)

    def _entries(self) -> list[CheckpointEntry]:
        store = self._store or self._earlier
        return [] if store is None else store.list()

    def _stored(self, id: str) -> tuple[bytes, Sequence[bytes]]:
        store = self._store or self._earlier
        assert store is not None
        return store._open("open").stored_bytes(id)

    def _published(self, entry: CheckpointEntry) -> None:
        """Called by the store, before the save that made this entry is known to have ended."""
        try:
            if self._is_private and entry.kind == "base":
                self._sweeps = True
            if self._server is not None:
                self._server.refresh()
        except Exception as error:  # It is published; subscribers see it with the next step.
            url = None if self._store is None else self._store.url
            logger.warning("%s: could not notify subscribers of step %d: %s", url, entry.step, error)

    def _sweep(self, store: CheckpointStore) -> None:
        """Delete checkpoints replaced by a base. Called in the publisher's turn, while no save is running."""
        if not self._sweeps:
            return
        self._sweeps = False
        try:
            # Nobody else can reach the store, and a subscriber that misses what it was about to
            # read asks again.
            store._open("open").sweep(0.0, True, False)
        except S4Error as error:
            logger.warning("%s: could not delete replaced checkpoints: %s", store.url, error)


@dataclass(frozen=True)
class Update:
    """The result of `Subscriber.apply_delta`.

    Attributes:
        step: the step whose weights the subscriber now has.
        id: the id of that step's checkpoint.
        deltas: number of deltas applied; 0 if the weights were read from a base.
        bytes: stored size of all data that was read.
        raw_bytes: size of the weights in memory.
        why_base: the reason if the update started from a base; otherwise ``None``.
        seconds: duration of the update.
    """

    step: int
    id: str
    deltas: int
    bytes: int
    raw_bytes: int
    why_base: str | None
    seconds: float


class _Held(NamedTuple):
    """The checkpoint whose values the weights hold."""

    entry: CheckpointEntry
    digest: str


class _Source(Protocol):
    """A source of checkpoints."""

    name: str

    def entries(self, after: str | None, wait: float) -> list[CheckpointEntry]: ...
    def alone(self, entry: CheckpointEntry, most: int) -> _core.Reader: ...
    def whole(self, chain: list[CheckpointEntry], most: int) -> _core.Reader: ...
    def close(self) -> None: ...


class _Stored:
    """Checkpoints of a store."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store, self.name = store, str(store.url)

    def entries(self, after: str | None, wait: float) -> list[CheckpointEntry]:
        end = time.monotonic() + wait
        while True:
            found = self._store.list()
            left = end - time.monotonic()
            if (found and found[-1].id != after) or left <= 0:
                return found
            time.sleep(min(_POLL, left))

    def alone(self, entry: CheckpointEntry, most: int) -> _core.Reader:
        return self._store._open("open").open_alone(entry.id)

    def whole(self, chain: list[CheckpointEntry], most: int) -> _core.Reader:
        return self._store._open("open").open(chain[-1].id)

    def close(self) -> None:
        self._store.close()


class Subscriber:
    """Keeps weights up to date with the latest published weights.

    Only one thread at a time changes the weights. The caller must ensure that nobody uses them at
    the same time.

    Args:
        source: the folder or URL of a store, or the address that a `Publisher` listens at.
        weights: a module, or containers of tensors, with the same tensors as the published weights.
            They are updated in place; additional host memory is only needed for tensors that are
            not contiguous, and for those on devices that s4weights cannot decode on.
        timeout: seconds for which a source that does not respond is retried.
        threads: as in `load`.
        device: as in `load`, as are ``gpu_scratch`` and ``storage_options``.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        weights: object,
        *,
        timeout: float = 30.0,
        threads: int | None = None,
        device: str = "auto",
        gpu_scratch: int | None = None,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        check_threads(threads)
        check_seconds("timeout", timeout)
        compute = Compute(device, gpu_scratch)
        text = os.fspath(source)
        if not isinstance(text, str):
            raise TypeError(f"{source!r}: expected a folder, a URL or the address of a publisher")
        self._source: _Source
        if is_address(text):
            if storage_options:
                raise ValueError("storage_options: only supported for a store")
            self._source = Client(text, timeout, threads)
        else:
            options: dict[str, Any] = {"storage_options": storage_options, "read_only": True}
            self._source = _Stored(
                CheckpointStore(text, threads=threads, timeout=timeout, **options)
            )
        self._weights = LiveWeights(weights, compute)
        self._held: _Held | None = None
        self._turn = Turn()
        _forked.add(self)

    @property
    def step(self) -> int | None:
        """The step whose values the weights have. ``None`` before the first update, and after one
        that failed halfway.
        """
        held = self._held
        return None if held is None else held.entry.step

    def close(self) -> None:
        """Close the source. The weights keep their values."""
        self._source.close()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def apply_delta(self, step: int | None = None, *, wait: float = 0.0) -> Update | None:
        """Update the weights to the latest published step, or to a given step.

        Args:
            step: the training step, which may be an earlier one. ``None`` means the newest.
            wait: seconds to wait for something new.

        Returns:
            A description of the update, or ``None`` if there was nothing to do. Tensors that were
            replaced or moved since the last call are filled, even if nothing new was published.

        Raises:
            RuntimeError: it is called by a signal handler that interrupted an update.
            NotFoundError: the step is not listed.
            MismatchError: the tensors do not match the published ones. No tensor was changed.
            CorruptDataError: a published checkpoint is damaged.
            StorageError: the source does not respond.
            After the last two errors, the values of the weights are undefined, and the next call
            reads all of them.
        """
        check_seconds("wait", wait)
        step = None if step is None else checked_step(step)
        if self._turn.is_mine():
            raise RuntimeError("this thread is already updating the weights: a signal handler cannot do so, too")
        end = time.monotonic() + wait
        while True:
            held = self._held
            after = None if held is None or step is not None else held.entry.id
            # Out of turn: other threads need not wait for something new.
            entries = self._source.entries(after, wait)
            with self._turn.take():
                changed = self._held is not held
                if changed:
                    # Meanwhile another thread may have got further than this list.
                    entries = self._source.entries(None, 0.0)
                done = self._bring_listed(entries, step)
            wait = end - time.monotonic()
            # The other thread may already have applied the new checkpoint: there is time left to
            # wait for more.
            if done is not None or step is not None or not changed or wait <= 0:
                return done

    def _bring_listed(self, entries: list[CheckpointEntry], step: int | None) -> Update | None:
        try:
            return self._bring(entries, step)
        except NotFoundError:
            # A checkpoint that was just listed may have been retired and deleted since.
            again = self._source.entries(None, 0.0)
            if [entry.id for entry in again] == [entry.id for entry in entries]:
                raise
            return self._bring(again, step)

    def _bring(self, entries: list[CheckpointEntry], step: int | None) -> Update | None:
        recorder = Recorder("apply", self._source.name)
        wanted = entries if step is None else [e for e in entries if e.step == step]
        if not wanted:
            if step is None:
                return None
            raise NotFoundError(2, f"no checkpoint for step {step}", self._source.name)
        held, target = self._held, wanted[-1]
        if held is not None and held.entry.id == target.id and not self._weights.replaced():
            return None
        recorder.step, recorder.raw_bytes = target.step, target.raw_bytes
        with recorder.watch():
            return self._bring_to(target, self._chain(entries, target), recorder)

    def _bring_to(
        self, target: CheckpointEntry, chain: list[CheckpointEntry], recorder: Recorder
    ) -> Update:
        start, held = time.perf_counter(), self._held
        ids = [entry.id for entry in chain]
        if held is None:
            why: str | None = "no weights were loaded before"
        elif held.entry.id not in ids:
            why = f"step {held.entry.step} is not in the chain of step {target.step}"
        else:
            todo = chain[ids.index(held.entry.id) + 1 :]
            with recorder.stage("apply"):
                why = self._apply(held, todo, chain)
        if why is not None:
            todo = chain
            self._held = None
            with recorder.stage("open"):
                reader = self._source.whole(chain, self._most())
            with recorder.stage("read"):
                self._weights.read(reader)
            self._held = _Held(target, reader.digests()[0])
            logger.info("%s: loaded step %d from its base: %s", self._source.name, target.step, why)
        stored = sum(entry.bytes for entry in todo)
        recorder.stored_bytes, recorder.chain = stored, len(todo)
        return Update(
            target.step,
            target.id,
            len(todo) if why is None else 0,
            stored,
            target.raw_bytes,
            why,
            time.perf_counter() - start,
        )

    def _apply(
        self, held: _Held, todo: list[CheckpointEntry], chain: list[CheckpointEntry]
    ) -> str | None:
        """Apply deltas, one after the other. If that is not possible, return the reason."""
        if self._weights.replaced():
            return "tensors were replaced, converted or moved"
        for entry in todo:
            reader = self._source.alone(entry, self._most())
            own, parent = reader.digests()
            if not self._weights.fits(reader):
                return f"step {entry.step} has other tensors"
            # A base that replaced a delta has the same values, but a hash of its own.
            if parent != held.digest and held.entry.parent is not None:
                return f"step {entry.step} is a delta of another checkpoint"
            self._held = None
            upto = chain[: chain.index(entry) + 1]
            try:
                self._weights.apply(reader, lambda: self._source.whole(upto, self._most()))  # noqa: B023
            except CorruptDataError as error:
                logger.warning("%s: reading all weights again: %s", self._source.name, error)
                return f"the weights did not match step {held.entry.step}, or the delta is damaged"
            self._held = held = _Held(entry, own)
        return None

    def _chain(
        self, entries: list[CheckpointEntry], target: CheckpointEntry
    ) -> list[CheckpointEntry]:
        """The chain of a checkpoint, the base first."""
        known = {entry.id: entry for entry in entries}
        chain = [target]
        while chain[-1].parent is not None:
            above = known.get(chain[-1].parent)
            if above is None or len(chain) > _MOST_CHAIN:
                what = f"{self._source.name}: step {target.step} has no base"
                raise CorruptDataError(what)
            chain.append(above)
        return chain[::-1]

    def _most(self) -> int:
        """The most bytes that a checkpoint of these weights can have."""
        return 2 * self._weights.nbytes + _OVERHEAD
