"""Saves that go on in the background, and how a process ends in spite of them."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from . import _core, _live
from ._errors import S4Error

if TYPE_CHECKING:
    import torch

    from ._entries import CheckpointEntry
    from ._store import CheckpointStore

logger = logging.getLogger("s4weights")

#: Storages start at multiples of this in the host buffer.
_ALIGN = 64


class SaveFuture(Future["CheckpointEntry"]):
    """A future that knows whether anybody has seen its error."""

    def __init__(self, on_seen: Callable[[], None]) -> None:
        super().__init__()
        self._on_seen = on_seen
        self._seen = False

    def result(self, timeout: float | None = None) -> CheckpointEntry:
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


class PendingSave:
    """A checkpoint that is being saved in the background.

    Any thread may use it, several at once. In a process that was forked while the save ran it has
    failed: the save goes on in the parent process alone.

    Attributes:
        step: the training step.
        url: the store.
        staged: done when the tensors were copied, those on CUDA devices as what they were encoded
            to: the caller may change them from then on.
        committed: done when the checkpoint is listed; its result is the entry.
    """

    def __init__(self, step: int, url: str) -> None:
        self.step = step
        self.url = url
        self.staged: Future[None] = Future()
        self.committed = SaveFuture(lambda: _live.discard(self))
        self._thread: threading.Thread | None = None
        self._given_up = False

    def wait(self, timeout: float | None = None) -> CheckpointEntry:
        """Waits until the checkpoint is listed. Raises what the save failed with."""
        return self.committed.result(timeout)

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self.committed.done()

    def _start(self, save: Callable[[], CheckpointEntry]) -> None:
        """Runs the save on a thread of its own, which the interpreter waits for when it ends."""
        self._thread = threading.Thread(target=self._run, args=(save,), name="s4weights-save")
        _live.add(self)
        try:
            self._thread.start()
        except BaseException:
            _live.discard(self)
            raise

    def _run(self, save: Callable[[], CheckpointEntry]) -> None:
        try:
            entry = save()
        except BaseException as error:
            # What the save held on to is not needed to tell why it failed.
            traceback.clear_frames(error.__traceback__)
            logger.error("%s: the save of step %d failed: %s", self.url, self.step, error)
            self._stage()
            self.committed.set_exception(error)
        else:
            self._stage()
            self.committed.set_result(entry)
            _live.discard(self)

    def _stage(self) -> None:
        if not self.staged.done():
            self.staged.set_result(None)

    def _give_up(self) -> None:
        """Has the save end soon, and waits for that."""
        self._given_up = True
        self.committed.exception()

    def _check(self) -> None:
        """Raises, in the save, once it was given up."""
        if self._given_up:
            raise S4Error("the save was given up: its tensors were not copied yet")

    def _abandon(self) -> None:
        """In the child after a fork: threads that are not there may hold the locks of futures."""
        error = S4Error(
            f"{self.url}: the save of step {self.step} goes on in the process that was forked, not "
            "in this one"
        )
        for future in (self.staged, self.committed):
            if future._state == "FINISHED":
                future._condition = threading.Condition()
            else:
                Future.__init__(future)
                future.set_exception(error)


class HostBuffer:
    """Host memory that snapshots are copied to, used again for the next one.

    It belongs to one save at a time, from before the copy until that save has ended.
    """

    def __init__(self, threads: int | None) -> None:
        self._threads = threads
        self._buffer: torch.Tensor | None = None

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
        signal.signal(signal.SIGTERM, before)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, handle)
    store._after_save = lambda: end() if received else None
    try:
        yield
    finally:
        store._after_save = None
        if signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, before)
