"""Handing checkpoints to a runner: the client, with a real runner if `S4W_PROGRAM` names one."""

from __future__ import annotations

import contextlib
import copy
import errno
import http.server
import json
import os
import pickle
import shutil
import signal
import socketserver
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import s4weights
from in_time import free_port, in_time
from s4weights import CheckpointStore, StorageError
from s4weights._runner import STATES

#: The native program; the wheel's own `s4w` has no `serve`.
PROGRAM = os.environ.get("S4W_PROGRAM") or shutil.which("s4w-native")

needs_program = pytest.mark.skipif(
    PROGRAM is None, reason="S4W_PROGRAM names no `s4w` with `serve`"
)


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(64, 512, generator=generator) * 0.02 + step * 1e-5
    return {"model": {"w": weights, "b": torch.full((512,), float(step))}, "step": step}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a["step"] == b["step"] and all(torch.equal(a["model"][k], b["model"][k]) for k in "wb")


class Runner:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = str(folder / "store")
        self.address = f"unix://{folder}/s4w.sock"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert PROGRAM is not None
        (self.folder / "runner.toml").write_text("min_free_bytes = 0\nthreads = 1\n")
        command = [PROGRAM, "serve", "--config", str(self.folder / "runner.toml")]
        command += ["--store", self.store, "--state-dir", str(self.folder / "state")]
        command += ["--socket", str(self.folder / "s4w.sock"), "--http", f"127.0.0.1:{free_port()}"]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, (self.folder / "log").read_text()


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(tmp_path)
    yield runner
    if runner.process is not None and runner.process.poll() is None:
        runner.kill()


@needs_program
@pytest.mark.filterwarnings("error")
def test_a_save_is_the_runners_once_it_is_staged(runner: Runner) -> None:
    runner.start()
    with CheckpointStore(runner.store, runner=runner.address, threads=1) as store:
        saved = [store.save_checkpoint(state(n), n, metrics={"loss": 1 / n}) for n in range(1, 4)]
        later = store.save_checkpoint(state(4), 4, blocking=False, tags={"run": "a"})
        assert later.wait("staged", timeout=60) in STATES
        for handle in [*saved, later]:
            assert handle.wait(timeout=60) == "durable" and handle.done()
        assert store.runner is not None
        store.runner.flush(timeout=60)
        assert store.runner.status()["last_durable"]["step"] == 4
        assert store.runner.interruption() is None
        assert same(store.load_checkpoint(), state(4))
        assert same(store.load_checkpoint(2), state(2))
        part = store.load_checkpoint(3, keys=["model.b"])
        assert torch.equal(part["model"]["b"], state(3)["model"]["b"]) and "w" not in part["model"]
        assert [entry.step for entry in store.list()] == [1, 2, 3, 4]
        with pytest.raises(s4weights.NotFoundError):
            store.load_checkpoint(9)
    runner.end()
    with CheckpointStore(runner.store) as alone:
        assert same(alone.load_checkpoint(4), state(4))
        assert alone.list()[0].metrics == {"loss": 1.0}
    assert not list((runner.folder / "state/staging/incoming").iterdir())
    assert not list((runner.folder / "state/staging/restored").iterdir())


@needs_program
def test_a_runner_that_is_killed_is_waited_for(runner: Runner) -> None:
    runner.start()
    store = CheckpointStore(runner.store, runner=runner.address, threads=1)
    first = store.save_checkpoint(state(1), 1)
    runner.kill()
    threading.Timer(0.5, runner.start).start()
    second = store.save_checkpoint(state(2), 2)
    assert first.wait(timeout=60) == second.wait(timeout=60) == "durable"
    runner.end()
    with CheckpointStore(runner.store) as alone:
        assert [entry.step for entry in alone.list()] == [1, 2]
        assert same(alone.load_checkpoint(1), state(1))


@needs_program
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_torch_writes_is_taken_from_a_watched_folder(runner: Runner, tmp_path: Path) -> None:
    converter = shutil.which("s4w", path=str(Path(os.sys.executable).parent))  # type: ignore[attr-defined]
    if converter is None:
        pytest.skip("the wheel's program is not installed")
    drop = tmp_path / "drop"
    drop.mkdir()
    runner.start()
    runner.kill()
    with (tmp_path / "runner.toml").open("a") as file:
        file.write(f'[watch]\nfolder = "{drop}"\nremove = true\nsettle_seconds = 0\n')
        file.write(f'pt_converter = "{converter}"\n')
    command = list(runner.process.args)  # type: ignore[union-attr, arg-type]
    runner.process = subprocess.Popen(command)
    torch.save(state(5), tmp_path / "step_5.pt")
    (tmp_path / "step_5.pt").rename(drop / "step_5.pt")
    mark = tmp_path / "executed"

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (mark,))

    torch.save({"x": Evil()}, drop / "step_6.pt")
    # Folders of torch.distributed.checkpoint, and one whose metadata would run something.
    for step in (7, 8):
        dcp.save(state(step), checkpoint_id=drop / f"step_{step}", no_dist=True)
    (drop / "step_8" / ".metadata").write_bytes(pickle.dumps(Evil()))
    end = time.monotonic() + 90
    while (drop / "step_5.pt").exists() or (drop / "step_7").exists():
        assert time.monotonic() < end
        time.sleep(0.1)
    runner.end()
    assert (drop / "step_6.pt").exists() and (drop / "step_8").exists() and not mark.exists()
    with CheckpointStore(runner.store) as store:
        assert [entry.step for entry in store.list()] == [5, 7]
        assert same(store.load_checkpoint(5), state(5)) and same(store.load_checkpoint(7), state(7))


# Against a server whose answers the test chooses.


@contextlib.contextmanager
def answering(folder: Path, answers: list[tuple[int, Any]]) -> Iterator[tuple[str, list[str]]]:
    seen: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def address_string(self) -> str:
            return "trainer"

        def log_message(self, *_: object) -> None:
            pass

        def answer(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            seen.append(f"{self.command} {self.path} {self.rfile.read(length).decode()}".strip())
            status, body = answers[min(len(seen) - 1, len(answers) - 1)]
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = answer

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True

    path = folder / "mock.sock"
    with Server(str(path), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"unix://{path}", seen
        server.shutdown()


def room(folder: Path) -> tuple[int, Any]:
    return 200, {"incoming": str(folder), "room_bytes": 1, "accepting": True}


def open_store(tmp_path: Path, address: str, timeout: float = 120) -> CheckpointStore:
    return CheckpointStore(tmp_path / "store", runner=address, timeout=timeout, threads=1)


def test_a_full_runner_is_waited_for(tmp_path: Path) -> None:
    full = 507, {"error": "full", "message": "no room"}
    with answering(tmp_path, [room(tmp_path), full, full, (200, {"state": "staged"})]) as (
        url,
        seen,
    ):
        open_store(tmp_path, url).save_checkpoint(state(1), 1)
    submitted = {line for line in seen if line.startswith("POST /v1/submissions")}
    assert len(seen) == 4 and len(submitted) == 1, "the same submission each time"


def test_what_is_refused_is_raised_and_leaves_nothing(tmp_path: Path) -> None:
    for status, error, kind in [
        (403, StorageError, "forbidden"),
        (409, s4weights.ConflictError, "conflict"),
        (400, s4weights.S4Error, "bad_request"),
    ]:
        refused = status, {"error": kind, "message": "because"}
        with answering(tmp_path, [room(tmp_path), refused]) as (url, seen):
            with pytest.raises(error, match="because"):
                open_store(tmp_path, url).save_checkpoint(state(1), 1)
            assert len(seen) == 2
        (tmp_path / "mock.sock").unlink()
        assert not list(tmp_path.glob("*.s4w"))


def test_a_background_save_that_is_refused_raises_where_it_is_waited_for(tmp_path: Path) -> None:
    refused = 400, {"error": "refused", "message": "because"}
    with answering(tmp_path, [room(tmp_path), refused]) as (url, _):
        saved = open_store(tmp_path, url).save_checkpoint(state(1), 1, blocking=False)
        with pytest.raises(s4weights.S4Error, match="because"):
            saved.wait(timeout=120)
    assert not list(tmp_path.glob("*.s4w"))


def test_a_background_save_that_is_refused_is_not_forgotten(tmp_path: Path) -> None:
    refused = 400, {"error": "refused", "message": "because"}
    for then in ("save", "load", "close", "exit"):
        with answering(tmp_path, [room(tmp_path), refused]) as (url, _):
            store = open_store(tmp_path, url)
            script = f"""
import torch
from s4weights import CheckpointStore
store = CheckpointStore({str(tmp_path / "store")!r}, runner={url!r}, timeout=120)
store.save_checkpoint({{"w": torch.ones(3)}}, 7, blocking=False)
"""
            if then == "exit":
                command = [sys.executable, "-c", script]
                done = subprocess.run(command, capture_output=True, text=True, timeout=300)
                assert done.returncode == 120 and "save of step 7 FAILED" in done.stderr, done
            else:
                saved = store.save_checkpoint(state(1), 1, blocking=False)
                saved.guard()
                saved.wait_staged(120)
                with pytest.raises(s4weights.S4Error, match="because"):
                    if then == "save":
                        store.save_checkpoint(state(2), 2)
                    elif then == "load":
                        store.load_checkpoint()
                    else:
                        store.close()
        (tmp_path / "mock.sock").unlink()
    with pytest.raises(ValueError, match="closed"):
        closed = CheckpointStore(tmp_path, runner="unix:///s")
        closed.close()
        closed.load_checkpoint()


def test_one_checkpoint_in_the_background(tmp_path: Path) -> None:
    with answering(tmp_path, [room(tmp_path), (200, {"state": "durable"})]) as (url, seen):
        saved = s4weights.save_checkpoint(
            state(1), tmp_path / "store", 1, blocking=False, runner=url
        )
        assert saved.wait(timeout=120) == "durable"  # type: ignore[comparison-overlap, call-arg]
        assert any(line.startswith("POST /v1/submissions") for line in seen)


def test_a_progress_function_cannot_load_what_waits_for_it(tmp_path: Path) -> None:
    saved, errors = threading.Event(), []

    def progress(done: int, total: int) -> None:
        if not done:
            return  # It is called at once, on this thread.
        assert saved.wait(120)
        try:
            store.load_checkpoint()
        except RuntimeError as error:
            errors.append(str(error))

    with answering(tmp_path, [room(tmp_path), (200, {"state": "staged"})]) as (url, _):
        store = open_store(tmp_path, url)
        handle = store.save_checkpoint(state(1), 1, blocking=False, progress=progress)
        saved.set()
        handle.wait("staged", timeout=120)  # type: ignore[call-arg, arg-type]
    assert errors and "a progress function can neither save" in errors[0]


def test_patience_ends(tmp_path: Path) -> None:
    store = open_store(tmp_path, f"unix://{tmp_path}/nobody.sock", timeout=0.3)

    def give_up() -> None:
        with pytest.raises(StorageError, match="does not respond") as raised:
            store.save_checkpoint(state(1), 1)
        assert raised.value.errno == errno.ENOENT

    in_time(5, give_up)
    with answering(tmp_path, [(200, b"<html>")]) as (url, _), pytest.raises(StorageError):
        open_store(tmp_path, url, timeout=0.3).save_checkpoint(state(1), 1)


def test_a_wait_tells_what_is_wrong(tmp_path: Path) -> None:
    id = str(uuid.uuid4())
    waiting = 200, {"state": "verified", "error": "no such bucket", "id": id}
    answers = [room(tmp_path), (200, {"state": "staged"}), waiting]
    with answering(tmp_path, answers) as (url, _):
        saved = open_store(tmp_path, url).save_checkpoint(state(1), 1)
        assert saved.wait("verified", timeout=0.2) == "verified"
        with pytest.raises(TimeoutError, match="no such bucket"):
            saved.wait(timeout=0.2)
        with pytest.raises(ValueError, match="state="):
            saved.wait("done")
        assert not saved.done()
    (tmp_path / "mock.sock").unlink()
    answers[2] = 200, {"state": "failed", "error": "damaged", "id": id}
    with answering(tmp_path, answers) as (url, _):
        saved = open_store(tmp_path, url).save_checkpoint(state(1), 1)
        with pytest.raises(s4weights.CorruptDataError, match="damaged"):
            saved.wait("staged", timeout=120)


def test_arguments_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for address in ("s4w.sock", "http://localhost", "unix://host/path", "unix:relative"):
        with pytest.raises(ValueError, match="runner="):
            CheckpointStore(tmp_path, runner=address)
    with pytest.raises(ValueError, match="retention"):
        CheckpointStore(tmp_path, runner="unix:///s", retention=3)
    store = CheckpointStore(tmp_path, runner="unix:///s", timeout=0.1)
    with pytest.raises(ValueError, match="base"):
        store.save_checkpoint(state(1), 1, base=True)
    for other in (copy.copy(store), pickle.loads(pickle.dumps(store))):
        assert other.runner is not None and other.runner._socket == "/s"
