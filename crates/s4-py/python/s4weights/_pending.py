"""Background saves, and how a process ends while some are running."""

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
from ._sources import check_seconds

if TYPE_CHECKING:
    import torch

    from ._staging import StagedValues
    from ._store import CheckpointStore

T = TypeVar("T")

#: Values of saves that continue in the parent process, kept so that they are never freed here.
_ABANDONED: list[StagedValues | None] = []
#: Numbers saves, so that failures are reported in the order in which saves began.
_numbers = itertools.count()

logger = logging.getLogger("s4weights")

#: Storages start at multiples of this in the host buffer.
_ALIGN = 64


class Outcome(Future[T]):
    """A future that cannot be cancelled: the save continues in any case."""

    def cancel(self) -> bool:
        return False


class SaveFuture(Outcome[T]):
    """A future that records whether its error has been seen."""

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
        """Wait. Return the error if it has not been seen yet. If several callers wait, one gets it."""
        outcome = super().exception()
        with self._condition:
            seen, self._seen = self._seen, True
        self._on_seen()
        return None if seen else outcome

    def raise_unseen(self) -> None:
        """Wait. Raise the error if it has not been seen yet."""
        if (error := self.settle()) is not None:
            raise error


class Pending(Generic[T]):
    """A save that runs in the background. `PendingSave` describes the attributes.

    ``committed`` is done when the save is; its result is what a blocking call returns.
    """

    #: The call that would report a failure.
    _reporting_call = "close()"

    def __init__(self, what: str) -> None:
        self.stage = "host"
        self.staged: Future[None] = Outcome()
        self.committed: SaveFuture[T] = SaveFuture(lambda: _live.discard(self))
        self._what = what
        self._number = next(_numbers)
        self._values: StagedValues | None = None
        self._thread: threading.Thread | None = None
        # Held permanently by the thread that ends the save: the save's own, or that of a caller that gives it up before
        # the save's own thread has begun. Nobody else frees the values.
        self._owner = threading.RLock()
        self._given_up = False
        self._abandoned = False

    def __repr__(self) -> str:
        if not self.committed.done():
            state = "staged" if self.staged.done() else "reading values"
        else:
            # Unlike `exception()`, this does not mark the error as seen.
            state = "done" if Future.exception(self.committed) is None else "failed"
        return f"<{type(self).__name__} {self._what}: {state}>"

    def wait(self, timeout: float | None = None) -> T:
        """Wait until the save is done. Raises its error if it failed."""
        return self.committed.result(timeout)

    def done(self) -> bool:
        """Return whether the save has ended, successfully or not."""
        return self.committed.done()

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until the values have been read or copied, or the save has failed.

        After that, any thread, and any stream of a device, may change or free the tensors.

        Raises:
            TimeoutError: this took longer than ``timeout`` seconds. (The timeout does not cover
                copies on a device, which take milliseconds once the device starts them.)
        """
        if self._abandoned:
            return  # The save reads the parent process's memory.
        try:
            self.staged.result(timeout)
        except futures.TimeoutError as error:
            raise TimeoutError(f"{self._what}: values are still being read") from error
        values = self._values
        if values is not None:
            values.wait_copied()

    def guard(self, *optimizers: Any) -> Guard:
        """Make the next step of each optimizer wait until the values are staged.

        ``stage="lazy"`` requires this. With ``"device"`` and ``"host"`` no thread has to wait.

        It takes effect immediately. Loops without such optimizers can use it as a context manager
        around the update, or call `wait_staged` before the update::

            with pending.guard():
                update(parameters)

        Args:
            optimizers: PyTorch optimizers, or others with ``register_step_pre_hook``. Omit when
                used in a ``with`` statement.

        Raises:
            TypeError: an optimizer has no such method.
        """
        return Guard(self, optimizers)

    def _hold(self) -> None:
        """Make this thread, or the current streams, wait until the values may be changed."""
        if self._abandoned:
            return
        self.staged.result()
        values = self._values
        if values is not None:
            values.hold_streams()

    def _take(self, values: StagedValues) -> None:
        """Set the values of this save; called before it starts."""
        self._values, self.stage = values, values.stage
        if values.is_ready:
            self._stage()

    def _start(self, save: Callable[[], T]) -> None:
        """Run the save on a separate thread, which the interpreter waits for at exit.

        If this raises, or the call that it is part of raises after it, that call must use `_give_up`:
        an exception of a signal handler does not tell whether the thread has begun.
        """
        self._thread = threading.Thread(target=self._run, args=(save,), name="s4weights-save")
        _live.add(self)
        self._thread.start()

    def _runs_here(self) -> bool:
        """Whether this is a thread of the save, which must not wait for it."""
        return self._thread is threading.current_thread()

    def _run(self, save: Callable[[], T]) -> None:
        if not self._owner.acquire(blocking=False):
            return  # It was given up already.
        try:
            self._check()
            if self._values is not None:
                self._values.settle()
            result = save()
        except BaseException as error:
            _clear_frames(error)
            # The caller that gave it up has its own exception.
            level = logging.INFO if self._given_up else logging.ERROR
            logger.log(level, "%s failed: %s", self._what, error)
            self._end_values()
            self.committed.set_exception(error)
        else:
            self._end_values()
            self._prepare_next(result)
            self.committed.set_result(result)
            _live.discard(self)

    def _prepare_next(self, result: T) -> None:
        """Take page-locked memory for the next save. Called before anyone knows the result, and so
        might return such memory.
        """
        if self._values is None or self._values.engine is None:
            return
        try:
            prepare_pinned_memory(self._values.engine, self._stored_bytes(result))
        except Exception:
            logger.exception("%s: could not reserve memory for the next save", self._what)

    def _stored_bytes(self, result: T) -> int:
        """Bytes that the save stored."""
        raise NotImplementedError

    def _finish_values(self) -> None:
        """Called by the save once it needs neither the caller's tensors nor copies on devices."""
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
        """End a save whose call raises, so that its caller does not get this object. Returns
        once nothing reads the caller's tensors, and the save has ended, which it does soon.
        """
        self._given_up = True
        if self._owner.acquire(blocking=False) and not self.committed.done():
            # Its thread has not begun; if it does, it does nothing.
            self._end_values()
            self.committed.set_exception(self._error_of_giving_up())
        while not self.staged.done():
            # However often someone presses Ctrl-C: the caller might free values that are being read.
            with contextlib.suppress(BaseException):
                self.staged.exception()
        self.committed.exception()

    def _wait_returnable(self) -> None:
        """Wait for what must be done before the call returns."""
        if self._values is not None and self._values.waits:
            self.staged.result()

    def _give_way(self) -> None:
        """Called by the save before its native work: lowers its priority, unless the caller still
        waits for values to be read.
        """
        if self.staged.done():
            _core.give_way()

    def _check(self) -> None:
        """Called by the save: raises `S4Error` if the save was given up."""
        if self._given_up:
            raise self._error_of_giving_up()

    def _error_of_giving_up(self) -> S4Error:
        return S4Error(f"{self._what} was abandoned: the call that started it was interrupted")

    def _abandon(self) -> None:
        """Called in the child after a fork, where futures may be locked by threads that no longer exist."""
        self._abandoned = True
        # Their memory belongs to a driver that this process cannot use.
        _ABANDONED.append(self._values)
        error = S4Error(f"{self._what} continues in the parent process, not in this forked process")
        for future in (self.staged, self.committed):
            if future._state == "FINISHED":
                future._condition = threading.Condition()
            else:
                Future.__init__(future)
                future.set_exception(error)


class PendingSave(Pending[CheckpointEntry]):
    """A checkpoint that is being saved in the background.

    `CheckpointStore.save_checkpoint` returns it with ``blocking=False``. Several threads may use it
    at the same time. In a process that was forked during the save, it counts as failed, because the
    save continues only in the parent process.

    Attributes:
        step: the training step.
        url: the folder or URL of the store.
        stage: how the values as of the call are preserved: ``"device"``, ``"host"`` or ``"lazy"``.
        staged: a future that is done when the caller may change its tensors. With ``"device"`` and
            ``"host"`` it is done when the call returns. With ``"device"``, the copies have only
            been queued by then: a stream that does not wait for the stream that was current during
            the call must wait (`wait_staged`) before it writes to the tensors, as after any other
            work on them.
        committed: a future that is done when the checkpoint is listed. Its result is the entry.
    """

    def __init__(self, step: int, url: str) -> None:
        super().__init__(f"{url}: the save of step {step}")
        self.step = step
        self.url = url

    def _stored_bytes(self, result: CheckpointEntry) -> int:
        return result.bytes


class PendingFile(Pending[dict[str, Any]]):
    """A file that is being written in the background.

    `save` returns it with ``blocking=False``. The file appears only once it is complete.

    It is like `PendingSave`, but without ``step`` and ``url``, and with:

    Attributes:
        target: the path or URL, or the ``repr`` of a stream.
        committed: a future that is done when the file exists under its name. Its result is the
            return value of a blocking `save`.
    """

    _reporting_call = "wait()"

    def __init__(self, target: str) -> None:
        super().__init__(f"{target}: the save")
        self.target = target

    def _stored_bytes(self, result: dict[str, Any]) -> int:
        return int(result["bytes_out"])


class Outside(Pending[Any]):
    """A save that another library, such as PyTorch's DCP, runs in the background."""

    def __init__(self, what: str, running: list[Pending[Any]]) -> None:
        super().__init__(what)
        self._running = running
        self.committed = SaveFuture(self._discard)

    def follow(self, future: Future[Any]) -> None:
        """Take over the outcome of a future."""
        _live.add(self)
        self._running.append(self)
        future.add_done_callback(self._end)

    def _end(self, future: Future[Any]) -> None:
        self._stage()
        error = future.exception()
        if error is None:
            self.committed.set_result(future.result())
            self._discard()
        else:
            _clear_frames(error)
            logger.error("%s failed: %s", self._what, error)
            self.committed.set_exception(error)

    def _discard(self) -> None:
        """Called when the save has succeeded, or someone has seen its error."""
        _live.discard(self)
        with contextlib.suppress(ValueError):  # It was removed already.
            self._running.remove(self)


def _clear_frames(error: BaseException | None) -> None:
    """Drop what the functions that raised an error held on to, such as copies of tensors: its
    traceback would keep that alive. The same for the errors behind it, and those of DCP's ranks.
    """
    todo: list[tuple[Any, bool]] = [(error, False)]
    seen = set()
    while todo:
        one, has_text = todo.pop()
        if not isinstance(one, BaseException) or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        if has_text:
            # DCP keeps the traceback as text. Its functions hold on to tensors even when their
            # frames are cleared, as they are closures.
            one.__traceback__ = None
        todo += [(one.__cause__, has_text), (one.__context__, has_text)]
        ranks = getattr(one, "failures", None)
        if isinstance(ranks, dict):
            todo += [(of[0], True) for of in ranks.values() if isinstance(of, tuple) and of]


#: For each optimizer, the saves that its next step waits for. The hook stays registered: it cannot
#: be removed while the optimizer runs its hooks, and it does nothing if there is no such save.
_waiting: weakref.WeakKeyDictionary[Any, list[Pending[Any]]] = weakref.WeakKeyDictionary()


class Guard:
    """The result of `PendingSave.guard`: entering it waits."""

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
                f"{type(optimizer).__name__} does not support step hooks: use `with "
                "pending.guard():` around the code that changes the tensors"
            ) from error
        _waiting[optimizer] = waiting
    waiting.append(pending)


def _hook(waiting: list[Pending[Any]]) -> Callable[..., None]:
    def wait(*arguments: object) -> None:
        while waiting:
            # If the wait is interrupted, the next step waits for the same save again.
            waiting[0]._hold()
            del waiting[0]

    return wait


class HostBuffer:
    """Host memory that values are copied to, and that the next save reuses.

    It belongs to one save at a time, from before the copy until that save has ended.
    """

    def __init__(self, threads: int | None) -> None:
        self._threads = threads
        self._buffer: torch.Tensor | None = None

    def parts(self, storages: Sequence[torch.UntypedStorage]) -> list[tuple[torch.Tensor, int]]:
        """Copy storages; return, for each, the buffer with its copy, and the copy's offset."""
        places = self.copy(storages)
        buffer = self._buffer
        assert buffer is not None
        start = buffer.data_ptr()
        return [(buffer, at - start) for at, _ in places]

    def copy(self, storages: Sequence[torch.UntypedStorage]) -> list[tuple[int, int]]:
        """Copy storages; return the address and size of each copy."""
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
        # The CPU copies host storages while the GPU copies its own.
        _core.copy_memory(host, self._threads)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return places

    def _grown(self, nbytes: int, pinned: bool) -> torch.Tensor:
        import torch

        have = self._buffer
        if have is None or have.numel() < nbytes or (pinned and not have.is_pinned()):
            self._buffer = None  # Frees the old buffer before the new one is allocated.
            # Not on the default device, which the caller may have set.
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
            return self._buffer
        return have

    def free(self) -> None:
        """Give the memory back."""
        self._buffer = None


class Deadline:
    """A point in time after which a save is abandoned."""

    def __init__(self) -> None:
        self._at: float | None = None

    def set(self, seconds: float) -> None:
        """Set the deadline, in seconds from now."""
        self._at = time.monotonic() + seconds

    def clear(self) -> None:
        """Remove the deadline."""
        self._at = None

    def check(self) -> None:
        """Raise `S4Error` if the deadline has passed."""
        if self._at is not None and time.monotonic() > self._at:
            raise S4Error("the save was abandoned: the process received SIGTERM, and the deadline passed")


@contextlib.contextmanager
def saving_here(store: CheckpointStore) -> Iterator[None]:
    """Around a save on this thread: if a SIGTERM arrives meanwhile, the process ends after the save
    (`finish_on_sigterm`).
    """
    main = threading.current_thread() is threading.main_thread() and not store._turn.is_mine()
    if main:
        store._saving_here = True
    try:
        yield
    finally:
        if main:
            store._saving_here = False
            if store._after_save is not None:
                store._after_save()


@contextlib.contextmanager
def finish_on_sigterm(store: CheckpointStore, deadline: float = 30.0) -> Iterator[None]:
    """Delay SIGTERM until running saves have ended, while this context manager is active.

    This covers saves on any thread, including a background save whose tensors are still being
    copied.

    A save that is not done ``deadline`` seconds after the signal is abandoned, and is not listed.
    Then the signal has its usual effect. Like all signal handlers, this must be set up on the main
    thread.
    """
    if not hasattr(store, "_drain"):
        raise TypeError(f"finish_on_sigterm({store!r}): expected a CheckpointStore")
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("finish_on_sigterm: signals can only be handled on the main thread")
    check_seconds("deadline", deadline)
    received: float | None = None
    again: threading.Timer | None = None  # Sends the signal once more.

    def handle(signum: int, frame: Any) -> None:
        nonlocal received, again
        if received is None:
            received = time.monotonic()
            store._deadline.set(deadline)
        # If this thread is in a save, that continues when the handler returns, and ends the
        # process afterwards (`_after_save`).
        if store._saving_here:
            return
        # Another call, such as a load, may hold the device that a background save needs: it goes on, and the signal is
        # sent again.
        if _core.nesting() and time.monotonic() < received + deadline:
            if again is None or not again.is_alive():  # It is not in a child after a fork.
                again = threading.Timer(0.05, send)
                again.daemon = True
                again.start()
        else:
            end()

    def send() -> None:
        nonlocal again
        again = None
        os.kill(os.getpid(), signal.SIGTERM)

    def end() -> None:
        if (timer := again) is not None:
            timer.cancel()
        store._drain(deadline)
        # `None`: a handler that Python did not install, and cannot restore.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, handle)
    store._after_save = lambda: None if received is None else end()
    try:
        yield
    finally:
        store._after_save = None
        if signal.getsignal(signal.SIGTERM) is handle:
            if received is not None:
                end()
            elif before is not None:
                signal.signal(signal.SIGTERM, before)
