"""Saves that run in the background, and how a process ends while some do."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from . import _core, _live
from ._device import prepare_pinned_memory
from ._entries import CheckpointEntry
from ._errors import S4Error

if TYPE_CHECKING:
    import torch

    from ._staging import StagedValues
    from ._store import CheckpointStore

T = TypeVar("T")

#: Values of saves that went on in another process.
_ABANDONED: list[StagedValues | None] = []
#: Saves are told of in the order in which they began.
_numbers = itertools.count()

logger = logging.getLogger("s4weights")

#: Storages start at multiples of this in the host buffer.
_ALIGN = 64


class Outcome(Future[T]):
    """A future that nobody can cancel: the save goes on whoever waits for it."""

    def cancel(self) -> bool:
        return False


class SaveFuture(Outcome[T]):
    """A future that knows whether anybody has seen its error."""

    def __init__(self, on_seen: Callable[[], None]) -> None:
        super().__init__()
        self._on_seen = on_seen
        self._seen = False

    def result(self, timeout: float | None = None) -> T:
        outcome = self.exception(timeout)
        if outcome is not None:
            raise outcome
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        outcome = super().exception(timeout)
        self._seen = True
        self._on_seen()
        return outcome

    def settle(self) -> BaseException | None:
        """Waits; gives the error if nobody has seen it: to one caller, if several wait."""
        outcome = super().exception()
        with self._condition:
            seen, self._seen = self._seen, True
        self._on_seen()
        return None if seen else outcome


class Pending(Generic[T]):
    """A save that goes on in the background.

    Any thread may use it, several at once. In a process that was forked while the save ran it has
    failed: the save goes on in the parent process alone.

    Attributes:
        stage: how values are kept as they were at the call: ``"device"``, ``"host"`` or ``"lazy"``.
        staged: done when the caller may change its tensors. With ``"device"`` and ``"host"`` that is
            the case when the call returns. With ``"device"`` the copies are queued by then, so that
            streams which do not wait for the one that was current are to wait (`wait_staged`)
            before they write to the tensors, as after any other work on them.
        committed: done when the save is; its result is what a call that blocks returns.
    """

    #: What tells of a failure.
    _teller = "close()"

    def __init__(self, what: str) -> None:
        self.stage = "host"
        self.staged: Future[None] = Outcome()
        self.committed: SaveFuture[T] = SaveFuture(lambda: _live.discard(self))
        self._what = what
        self._number = next(_numbers)
        self._values: StagedValues | None = None
        self._thread: threading.Thread | None = None
        self._given_up = False
        self._abandoned = False

    def __repr__(self) -> str:
        if not self.committed.done():
            state = "staged" if self.staged.done() else "reading values"
        else:
            # Asked in this way it does not count as seen.
            state = "done" if Future.exception(self.committed) is None else "failed"
        return f"<{type(self).__name__} {self._what}: {state}>"

    def wait(self, timeout: float | None = None) -> T:
        """Waits until the save is done. Raises what it failed with."""
        return self.committed.result(timeout)

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self.committed.done()

    def wait_staged(self, timeout: float | None = None) -> None:
        """Waits until the values have been read or copied, or the save has failed: from then on any
        thread, and any stream of a device, may change or free the tensors.

        Raises:
            TimeoutError: they were not within so many seconds. (Copies on a device, which take
                milliseconds once it gets to them, are waited for however long that is.)
        """
        if self._abandoned:
            return  # It is the parent process's memory that is read.
        try:
            self.staged.result(timeout)
        except futures.TimeoutError as error:
            raise TimeoutError(f"{self._what}: values are still being read") from error
        values = self._values
        if values is not None:
            values.wait_copied()

    def guard(self, *optimizers: Any) -> Guard:
        """Has steps of optimizers wait until the values are staged, each once: what ``stage="lazy"``
        needs. With ``"device"`` and ``"host"`` no thread has to wait.

        It does so from the call on. Other loops use it as a context manager around the update, or
        call `wait_staged` before it::

            with pending.guard():
                update(parameters)

        Args:
            optimizers: of PyTorch, or others with ``register_step_pre_hook``. None for ``with``.

        Raises:
            TypeError: an optimizer has no such method.
        """
        return Guard(self, optimizers)

    def _hold(self) -> None:
        """Waits, here or on the current streams, until the values may be changed."""
        if self._abandoned:
            return
        self.staged.result()
        values = self._values
        if values is not None:
            values.hold_streams()

    def _take(self, values: StagedValues) -> None:
        """The values of this save, before it starts."""
        self._values, self.stage = values, values.stage
        if values.is_ready:
            self._stage()

    def _start(self, save: Callable[[], T]) -> None:
        """Runs the save on a thread of its own, which the interpreter waits for when it ends."""
        self._thread = threading.Thread(target=self._run, args=(save,), name="s4weights-save")
        _live.add(self)
        try:
            self._thread.start()
        except BaseException:
            _live.discard(self)
            self._end_values()
            raise

    def _run(self, save: Callable[[], T]) -> None:
        try:
            if self._values is not None:
                self._values.settle()
            result = save()
        except BaseException as error:
            # What the save held on to is not needed to tell why it failed.
            traceback.clear_frames(error.__traceback__)
            logger.error("%s failed: %s", self._what, error)
            self._end_values()
            self.committed.set_exception(error)
        else:
            self._end_values()
            self._prepare_next(result)
            self.committed.set_result(result)
            _live.discard(self)

    def _prepare_next(self, result: T) -> None:
        """Before anybody knows of the result, and may give such memory back."""
        if self._values is None or self._values.engine is None:
            return
        try:
            prepare_pinned_memory(self._values.engine, self._stored_bytes(result))
        except Exception:
            logger.exception("%s: no memory was taken for the next one", self._what)

    def _stored_bytes(self, result: T) -> int:
        """Bytes that the save stored."""
        raise NotImplementedError

    def _finish_values(self) -> None:
        """Called in the save once it needs neither the caller's tensors nor copies on devices."""
        try:
            if self._values is not None:
                self._values.release()
        finally:
            self._stage()

    def _end_values(self) -> None:
        try:
            if self._values is not None:
                self._values.end()
        except Exception:
            logger.exception("%s: copies could not be freed", self._what)
        finally:
            self._stage()

    def _stage(self) -> None:
        if not self.staged.done():
            self.staged.set_result(None)

    def _give_up(self) -> None:
        """Has the save end soon, and waits for that."""
        self._given_up = True
        self.committed.exception()

    def _wait_returnable(self) -> None:
        """Waits for what must be done before the call returns. The caller goes on if that is
        interrupted, with tensors that are being read: then the save is given up.
        """
        values = self._values
        if values is None or not values.waits:
            return
        try:
            self.staged.result()
        except BaseException:
            self._give_up()
            raise

    def _give_way(self) -> None:
        """Called in the save before its native work: if nobody waits for values to be read, other threads go first."""
        if self.staged.done():
            _core.give_way()

    def _check(self) -> None:
        """Raises, in the save, once it was given up."""
        if self._given_up:
            raise S4Error("the save was given up: its tensors were not copied yet")

    def _abandon(self) -> None:
        """In the child after a fork: threads that are not there may hold the locks of futures."""
        self._abandoned = True
        # Their memory belongs to a driver that this process cannot use.
        _ABANDONED.append(self._values)
        error = S4Error(f"{self._what} goes on in the process that was forked, not in this one")
        for future in (self.staged, self.committed):
            if future._state == "FINISHED":
                future._condition = threading.Condition()
            else:
                Future.__init__(future)
                future.set_exception(error)


class PendingSave(Pending[CheckpointEntry]):
    """A checkpoint that is being saved in the background: `CheckpointStore.save_checkpoint` with
    ``blocking=False``.

    Any thread may use it, several at once. In a process that was forked while the save ran it has
    failed: the save goes on in the parent process alone.

    Attributes:
        step: the training step.
        url: the store.
        stage: how values are kept as they were at the call: ``"device"``, ``"host"`` or ``"lazy"``.
        staged: done when the caller may change its tensors. With ``"device"`` and ``"host"`` that is
            the case when the call returns. With ``"device"`` the copies are queued by then, so that
            streams which do not wait for the one that was current are to wait (`wait_staged`)
            before they write to the tensors, as after any other work on them.
        committed: done when the checkpoint is listed; its result is the entry.
    """

    def __init__(self, step: int, url: str) -> None:
        super().__init__(f"{url}: the save of step {step}")
        self.step = step
        self.url = url

    def _stored_bytes(self, result: CheckpointEntry) -> int:
        return result.bytes


class PendingFile(Pending[dict[str, Any]]):
    """A file that is being written in the background: `save` with ``blocking=False``. It appears when
    it is whole.

    As `PendingSave`, but for:

    Attributes:
        target: the path or URL; what a stream says of itself.
        committed: done when the file is there under its name; its result is what `save` returns
            otherwise.
    """

    _teller = "wait()"

    def __init__(self, target: str) -> None:
        super().__init__(f"{target}: the save")
        self.target = target

    def _stored_bytes(self, result: dict[str, Any]) -> int:
        return int(result["bytes_out"])


class Outside(Pending[Any]):
    """A save that others run in the background, such as PyTorch's DCP."""

    def __init__(self, what: str, running: list[Pending[Any]]) -> None:
        super().__init__(what)
        self._running = running

    def follow(self, future: Future[Any]) -> None:
        """Ends as a future does."""
        _live.add(self)
        self._running.append(self)
        future.add_done_callback(self._end)

    def _end(self, future: Future[Any]) -> None:
        self._stage()
        error = future.exception()
        if error is None:
            self.committed.set_result(future.result())
            _live.discard(self)
            self._running.remove(self)
        else:
            logger.error("%s failed: %s", self._what, error)
            self.committed.set_exception(error)


#: For each optimizer the saves that its next step waits for. The hook stays with the optimizer: it
#: cannot be removed while the optimizer goes through its hooks, and does nothing without a save.
_waiting: weakref.WeakKeyDictionary[Any, list[Pending[Any]]] = weakref.WeakKeyDictionary()


class Guard:
    """What `PendingSave.guard` returns: waits when it is entered."""

    def __init__(self, pending: Pending[Any], optimizers: Sequence[Any]) -> None:
        self._pending = pending
        for optimizer in optimizers:
            _guard(optimizer, pending)

    def __enter__(self) -> Guard:
        self._pending._hold()
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def _guard(optimizer: Any, pending: Pending[Any]) -> None:
    waiting = _waiting.get(optimizer)
    if waiting is None:
        waiting = []
        try:
            optimizer.register_step_pre_hook(_hook(waiting))
        except AttributeError as error:
            raise TypeError(
                f"{type(optimizer).__name__} takes no hooks for its steps: use `with "
                "pending.guard():` around what changes the tensors"
            ) from error
        _waiting[optimizer] = waiting
    waiting.append(pending)


def _hook(waiting: list[Pending[Any]]) -> Callable[..., None]:
    def wait(*arguments: object) -> None:
        while waiting:
            # One that is interrupted is waited for at the next step.
            waiting[0]._hold()
            del waiting[0]

    return wait


class HostBuffer:
    """Host memory that snapshots are copied to, used again for the next one.

    It belongs to one save at a time, from before the copy until that save has ended.
    """

    def __init__(self, threads: int | None) -> None:
        self._threads = threads
        self._buffer: torch.Tensor | None = None

    def parts(self, storages: Sequence[torch.UntypedStorage]) -> list[tuple[torch.Tensor, int]]:
        """Copies storages: the bytes of all copies, and where each one's begin."""
        places = self.copy(storages)
        buffer = self._buffer
        assert buffer is not None
        start = buffer.data_ptr()
        return [(buffer, at - start) for at, _ in places]

    def copy(self, storages: Sequence[torch.UntypedStorage]) -> list[tuple[int, int]]:
        """Copies storages: address and bytes of each copy."""
        import torch

        sizes = [storage.nbytes() for storage in storages]
        total = sum(-(-size // _ALIGN) * _ALIGN for size in sizes)
        devices = {s.device for s in storages if s.device.type == "cuda" and s.nbytes()}
        buffer = self._grown(total, bool(devices))
        start, at = buffer.data_ptr(), 0
        places, host = [], []
        for storage, size in zip(storages, sizes, strict=True):
            places.append((start + at, size))
            if size and storage.device.type == "cpu":
                host.append((start + at, storage.data_ptr(), size))
            elif size:
                source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                buffer[at : at + size].copy_(source[:size], non_blocking=buffer.is_pinned())
            at += -(-size // _ALIGN) * _ALIGN
        # While the GPU copies what is its own, the CPU copies the rest.
        _core.copy_memory(host, self._threads)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return places

    def _grown(self, nbytes: int, pinned: bool) -> torch.Tensor:
        import torch

        have = self._buffer
        if have is None or have.numel() < nbytes or (pinned and not have.is_pinned()):
            self._buffer = None  # The old one goes before the new one comes.
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
            return self._buffer
        return have

    def free(self) -> None:
        """Gives the memory back."""
        self._buffer = None


class Deadline:
    """A moment after which a save is to be given up."""

    def __init__(self) -> None:
        self._at: float | None = None

    def set(self, seconds: float) -> None:
        """Sets it, from now."""
        self._at = time.monotonic() + seconds

    def clear(self) -> None:
        """There is none any more."""
        self._at = None

    def check(self) -> None:
        """Raises once it is over."""
        if self._at is not None and time.monotonic() > self._at:
            raise S4Error("the save was given up: the process was told to end, and time was over")


@contextlib.contextmanager
def finish_on_sigterm(store: CheckpointStore, deadline: float = 30.0) -> Iterator[None]:
    """While it is open, SIGTERM lets saves that are running end before the process does, whichever
    thread they run on; also one in the background whose tensors are still being copied.

    A save that is not done ``deadline`` seconds after the signal is given up, and leaves no trace
    in the list. Then the signal has its usual effect. To be used on the main thread, as all signal
    handlers.
    """
    if not hasattr(store, "_drain"):
        raise TypeError(f"finish_on_sigterm({store!r}): a CheckpointStore expected")
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("finish_on_sigterm: signals can only be handled on the main thread")
    received = False

    def handle(signum: int, frame: Any) -> None:
        nonlocal received
        received = True
        store._deadline.set(deadline)
        # A call of this thread's goes on when the handler returns, and ends the process then.
        if not store._saving_here:
            end()

    def end() -> None:
        store._drain(deadline)
        # A handler that Python does not know of cannot be set again.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, handle)
    store._after_save = lambda: end() if received else None
    try:
        yield
    finally:
        store._after_save = None
        if signal.getsignal(signal.SIGTERM) is handle and before is not None:
            signal.signal(signal.SIGTERM, before)
