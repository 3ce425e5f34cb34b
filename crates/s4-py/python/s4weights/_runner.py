"""Hands checkpoints to a runner (``s4w serve``), which makes them durable in the background."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import logging
import socket
import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ._entries import labels_of, selected
from ._errors import ConflictError, CorruptDataError, NotFoundError, S4Error, StorageError
from ._pending import Guard, Pending, PendingFile
from ._save import save

logger = logging.getLogger("s4weights.runner")

#: The states of a submission, in the order in which it passes through them.
STATES = ("staged", "compressed", "verified", "uploading", "durable")

#: Seconds that one request may wait for a state.
_POLL = 20.0
#: Seconds between retries, at first and at most.
_PAUSE, _LONGEST_PAUSE = 0.05, 1.0


#: The arguments of a store and of a call that are passed on to `save`.
_ARGUMENTS = (
    *("threads", "device", "gpu_scratch", "pinned_memory", "staging_memory", "device_reserve"),
    *("stage", "progress", "metadata", "pickle_module", "pickle_protocol"),
)


class Submission(Pending[None]):
    """A background save that writes a file and hands it to a runner."""

    def __init__(self, step: int, client: RunnerClient) -> None:
        super().__init__(f"{client.address}: the save of step {step}")
        self.file: PendingFile | None = None

    def _give_up(self) -> None:
        if self.file is not None:
            self.file._give_up()
        super()._give_up()

    def _runs_here(self) -> bool:
        return super()._runs_here() or (self.file is not None and self.file._runs_here())


class RunnerSave:
    """A checkpoint that has been, or is being, handed to a runner.

    `CheckpointStore.save_checkpoint` returns it if the store has a ``runner=``. Any thread may use
    it. The runner continues even after this process has ended. If a background save fails before
    the runner has the checkpoint, the next save, load or `close` raises its error.

    Attributes:
        step: the training step.
        id: the id of the submission.
    """

    def __init__(self, client: RunnerClient, step: int, id: uuid.UUID) -> None:
        self.step = step
        self.id = str(id)
        self._client = client
        self._submission = Submission(step, client)

    def __repr__(self) -> str:
        return f"<RunnerSave step {self.step}, {self.id}>"

    def state(self) -> str:
        """``"saving"`` until the runner has the checkpoint, then ``"staged"``, ``"compressed"``,
        ``"verified"``, ``"uploading"``, ``"durable"`` or ``"failed"``.
        """
        if not self._submission.done():
            return "saving"
        self._submission.wait()
        return str(self._client.look(self.id)["state"])

    def done(self) -> bool:
        """Return whether the checkpoint is durable."""
        return self._submission.done() and self.state() == "durable"

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until the tensors may change, like `PendingSave.wait_staged`."""
        if self._submission.file is not None:
            self._submission.file.wait_staged(timeout)

    def guard(self, *optimizers: Any) -> Guard:
        """Like `PendingSave.guard`, for ``stage="lazy"``."""
        return (self._submission.file or self._submission).guard(*optimizers)

    def wait(self, state: str = "durable", timeout: float | None = None) -> str:
        """Wait until the checkpoint has reached a state. Return its current state.

        Raises:
            TimeoutError: it did not reach the state within ``timeout`` seconds. The save continues.
            CorruptDataError: the runner found that the checkpoint is damaged.
            StorageError: the runner could not be reached within the store's ``timeout``.
        """
        if state not in STATES:
            raise ValueError(f"state={state!r}: expected one of {', '.join(STATES)}")
        end = None if timeout is None else time.monotonic() + timeout
        try:
            self._submission.wait(timeout)
        except futures.TimeoutError as error:
            raise TimeoutError(f"step {self.step} is still being saved, not yet {state}") from error
        while True:
            left = _POLL if end is None else min(_POLL, end - time.monotonic())
            found = self._client.look(self.id, state, max(left, 0.0))
            if found["state"] == "failed":
                raise CorruptDataError(f"step {self.step}: {found['error']}")
            if STATES.index(found["state"]) >= STATES.index(state):
                return str(found["state"])
            if end is not None and time.monotonic() >= end:
                why = f": {found['error']}" if found.get("error") else ""
                raise TimeoutError(f"step {self.step} is {found['state']}, not yet {state}{why}")


class RunnerClient:
    """Talks to a runner over its socket. While a runner restarts, requests are retried: a request
    that reaches it twice takes effect once.
    """

    def __init__(self, address: str, timeout: float | None) -> None:
        if not isinstance(address, str):
            raise TypeError(f"runner={address!r}: expected an address such as unix:///path")
        parts = urlsplit(address)
        if parts.scheme != "unix" or parts.netloc or not parts.path.startswith("/"):
            raise ValueError(f"runner={address!r}: expected unix:///path/to/socket")
        self.address = address
        self._socket = unquote(parts.path)
        self._patience = 300.0 if timeout is None else timeout

    def save(
        self,
        begin: Callable[[Pending[Any]], None],
        obj: object,
        step: int,
        metrics: Mapping[str, float] | None,
        tags: Mapping[str, str] | None,
        blocking: bool,
        base: bool,
        arguments: Mapping[str, Any],
    ) -> RunnerSave:
        """Write a checkpoint to the runner's incoming folder, and submit it. Of ``arguments``,
        those of `save` are used. ``begin`` is called with the submission if it runs in the
        background.
        """
        if base:
            raise ValueError("base: not supported with a runner, which decides which checkpoints are deltas")
        numbers, texts = labels_of(metrics, tags)
        id = uuid.uuid4()
        path = Path(self._room()) / f"{id}.s4w"
        message = {
            "id": str(id),
            "step": step,
            "metrics": numbers,
            "tags": texts,
        }
        handle = RunnerSave(self, step, id)

        def submit() -> None:
            try:
                path.chmod(0o640)
                self._request("POST", "/v1/submissions", message)
            except BaseException:
                with contextlib.suppress(OSError):
                    path.unlink()
                raise

        # The file is only there briefly, so speed matters more than size.
        how = {"preset": "fast", **{name: arguments[name] for name in _ARGUMENTS}}
        submission = handle._submission
        if blocking:
            save(obj, path, **{**how, "stage": "auto"})
            submit()
            submission._stage()
            submission.committed.set_result(None)
            return handle
        # It reads no tensors itself.
        submission._stage()
        begin(submission)
        file = submission.file = save(obj, path, blocking=False, **how)

        def write_and_submit() -> None:
            file.wait()
            submit()

        submission._start(write_and_submit)
        return handle

    def _room(self) -> str:
        return str(self._request("GET", "/v1/staging")["incoming"])

    def look(self, id: str, state: str = "staged", wait: float = 0.0) -> dict[str, Any]:
        """A submission, as the runner describes it, after waiting for a state."""
        path = f"/v1/submissions/{id}?state={state}&timeout_ms={int(wait * 1000)}"
        return self._request("GET", path)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every accepted checkpoint is durable or has failed."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _POLL if end is None else max(0.0, min(_POLL, end - time.monotonic()))
            still = self._request("POST", "/v1/flush", {"timeout_ms": int(left * 1000)})["open"]
            if still == 0:
                return
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"{still} checkpoints are not durable yet")

    def status(self) -> dict[str, Any]:
        """Return the runner's status."""
        return self._request("GET", "/v1/status")

    def interruption(self, timeout: float = 0.0) -> dict[str, Any] | None:
        """Return the notice that the machine is about to be reclaimed, if there is one. Waits for
        it for up to ``timeout`` seconds (at most 20).
        """
        wait = int(min(timeout, _POLL) * 1000)
        found = self._request("GET", f"/v1/interruption?timeout_ms={wait}")["interruption"]
        return None if found is None else dict(found)

    @contextlib.contextmanager
    def restored(self, step: int | str | None) -> Any:
        """A checkpoint from the nearest place that has it, as a file that exists while this context
        manager is active.
        """
        with self.restored_step(step, stacklevel=6) as (_, path):
            yield path

    @contextlib.contextmanager
    def restored_step(self, step: int | str | None, *, stacklevel: int = 4) -> Any:
        """Like `restored`, with the step: of the newest checkpoint, which may not be in the store yet,
        only the runner knows it.
        """
        wanted: dict[str, Any] = {"request": str(uuid.uuid4()), "timeout_ms": int(_POLL * 1000)}
        if step is not None:
            wanted["id" if isinstance(step, str) else "step"] = selected(step)
        while "running" in (found := self._request("POST", "/v1/restore", wanted)):
            pass
        for problem in found["skipped"]:
            warnings.warn(f"skipped: {problem}", UserWarning, stacklevel=stacklevel)
        logger.debug("step %d comes from tier %s", found["step"], found["tier"])
        path = Path(found["path"])
        try:
            yield int(found["step"]), path
        finally:
            # If this is not permitted, the runner removes the file later.
            with contextlib.suppress(OSError):
                path.unlink()

    def _request(self, method: str, path: str, message: object = None) -> dict[str, Any]:
        """Send a request. Retries until the timeout while the runner does not answer, or answers
        that it is busy or full.
        """
        end = time.monotonic() + self._patience
        pause = _PAUSE
        body = None if message is None else json.dumps(message, allow_nan=False)
        while True:
            try:
                status, answer = self._once(method, path, body)
            except (OSError, http.client.HTTPException, ValueError) as error:
                failure: S4Error = self._unreachable(error)
            else:
                if status in (200, 202):
                    return answer
                failure = _failure(status, answer)
                if status not in (507, 503):
                    raise failure
            if time.monotonic() + pause > end:
                raise failure
            if isinstance(failure.__cause__, PermissionError):
                raise failure
            if pause == _PAUSE:
                logger.warning("%s; retrying for %.0f s", failure, self._patience)
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _once(self, method: str, path: str, body: str | None) -> tuple[int, dict[str, Any]]:
        connection = UnixConnection(self._socket, timeout=_POLL + 60.0)
        with contextlib.closing(connection):
            connection.request(method, path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            found = json.loads(answer.read())
            if not isinstance(found, dict):
                raise ValueError("the response is not a JSON object")
            return answer.status, found

    def _unreachable(self, cause: Exception) -> StorageError:
        number = getattr(cause, "errno", None) or errno.ECONNREFUSED
        error = StorageError(number, f"the runner does not respond: {cause}", self._socket)
        error.__cause__ = cause
        return error


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("runner", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _failure(status: int, answer: Mapping[str, Any]) -> S4Error:
    text = f"runner: {answer.get('message', f'status {status}')}"
    numbers = {403: errno.EACCES, 507: errno.ENOSPC, 503: errno.EAGAIN}
    if status in numbers:
        return StorageError(numbers[status], text)
    if status == 404:
        return NotFoundError(errno.ENOENT, text)
    if status == 409:
        return ConflictError(text)
    return S4Error(text) if status < 500 else StorageError(errno.EIO, text)
