"""How a process ends, or forks, while saves run in the background: nothing is lost silently."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from s4weights import CheckpointStore

PREPARE = """
import os, signal, sys, threading, time, torch
import s4weights
from s4weights import CheckpointStore
url = sys.argv[1]
def failing(store, step=7):
    # Too long: refused when the save is running already.
    return store.save_checkpoint({}, step, {"x" * 65_450: 0.0}, blocking=False)
"""


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PREPARE + script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    "script",
    [
        "store = CheckpointStore(url); failing(store)",
        "failing(CheckpointStore(url))  # collected before the end",
        "store = CheckpointStore(url); failing(store); sys.exit(0)",
        "store = CheckpointStore(url); pending = failing(store); time.sleep(1)",
        "store = CheckpointStore(url); failing(store); del store; import gc; gc.collect()",
        "threading.Thread(target=lambda: failing(CheckpointStore(url))).start()",
    ],
)
def test_a_failed_save_that_nobody_asked_about(tmp_path: Path, script: str) -> None:
    end = "\nimport atexit; atexit.register(print, 'other hooks run'); print('buffered', end='')"
    done = run(script + ("" if "exit" in script else end), tmp_path)
    assert done.returncode == 120, done.stderr
    assert "save of step 7 FAILED" in done.stderr and "log entry" in done.stderr
    assert "Unsaved" not in done.stderr and "Traceback" not in done.stderr
    if "exit" not in script:
        assert done.stdout == "bufferedother hooks run\n"


@pytest.mark.parametrize(
    "script",
    [
        "failing(CheckpointStore(url)).committed.exception()",
        "CheckpointStore(url).save_checkpoint({}, 1, blocking=False)",
        """
store = CheckpointStore(url)
failing(store)
try:
    store.close()
except s4weights.S4Error:
    pass
""",
    ],
)
def test_nothing_is_said_of_what_was_seen_or_went_well(tmp_path: Path, script: str) -> None:
    done = run(script, tmp_path)
    assert done.returncode == 0 and "FAILED" not in done.stderr, done.stderr


def test_an_exception_keeps_its_exit_status(tmp_path: Path) -> None:
    done = run("store = CheckpointStore(url); failing(store); raise KeyError('other')", tmp_path)
    assert done.returncode == 1
    assert "KeyError" in done.stderr and "save of step 7 FAILED" in done.stderr


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_process_fails_as_well(tmp_path: Path, method: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        PREPARE
        + f"""
import multiprocessing
def work():
    work.store = CheckpointStore(url)
    failing(work.store)
if __name__ == "__main__":
    worker = multiprocessing.get_context({method!r}).Process(target=work)
    worker.start()
    worker.join()
    sys.exit(50 + worker.exitcode)
"""
    )
    command = [sys.executable, str(script), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 51, done.stderr
    assert "save of step 7 FAILED" in done.stderr


def test_the_failure_is_logged_at_once(tmp_path: Path) -> None:
    script = """
pending = failing(CheckpointStore(url))
while not pending.done():
    time.sleep(0.01)
time.sleep(0.5)
os._exit(5)
"""
    done = run(script, tmp_path)
    assert done.returncode == 5 and "save of step 7 failed" in done.stderr


COPYING = """
# The copy takes a while, on any machine.
copy = s4weights._core.copy_memory
def slow(items, threads):
    print("copying", flush=True)
    time.sleep(1)
    copy(items, threads)
s4weights._core.copy_memory = slow
store = CheckpointStore(url)
store.save_checkpoint({}, 0)
state = {"w": torch.arange(1 << 20)}
with s4weights.finish_on_sigterm(store, 200):
    store.save_checkpoint(state, 1, blocking=False)
    time.sleep(600)
"""
ELSEWHERE = """
store = CheckpointStore(url, bandwidth=20 << 20)
store.save_checkpoint({}, 0)
def work():
    progress = lambda done, total: done and print("saving", flush=True)
    store.save_checkpoint({"w": torch.randn(4 << 20)}, 1, progress=progress)
with s4weights.finish_on_sigterm(store, 200):
    threading.Thread(target=work, daemon=True).start()
    time.sleep(600)
"""


DCP = """
from s4weights import dcp
store = CheckpointStore(url, bandwidth=20 << 20)
store.save_checkpoint({}, 0)
state = {"w": torch.randn(4 << 20)}
with s4weights.finish_on_sigterm(store, 200):
    print("saving", flush=True)
    %s
    time.sleep(600)
"""
DCP_HERE = DCP % "dcp.save(state, store, 1, no_dist=True)"
DCP_LATER = DCP % "dcp.async_save(state, store, 1, stager=dcp.Stager(), no_dist=True)"


IN_A_LOAD = """
s4weights.save({"w": torch.zeros(1 << 22)}, url + "/file")
store = CheckpointStore(url + "/store", bandwidth=20 << 20)
store.save_checkpoint({}, 0)
def slow(done, total):
    print("asked", flush=True)
    if done:
        time.sleep(0.2)
    print("answered", flush=True)
with s4weights.finish_on_sigterm(store, 200):
    store.save_checkpoint({"w": torch.randn(4 << 20)}, 1, blocking=False)
    s4weights.load(url + "/file", progress=slow)
    time.sleep(600)
"""


def test_sigterm_lets_another_call_finish(tmp_path: Path) -> None:
    """A load may hold what the background save needs, such as a GPU's memory."""
    command = [sys.executable, "-c", PREPARE + IN_A_LOAD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        # The first report comes before the work.
        assert [process.stdout.readline() for _ in range(3)][2] == b"asked\n"
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=300)
    # The function that was interrupted goes on, and so does the load.
    assert process.returncode == -signal.SIGTERM and said.startswith(b"answered\n")
    with CheckpointStore(tmp_path / "store") as store:
        assert [entry.step for entry in store.list()] == [0, 1]


LEFT_SOON = """
s4weights.save({"w": torch.zeros(9)}, url + "/file")
s4weights.load(url + "/file")  # The first call takes longer.
store = CheckpointStore(url + "/store", bandwidth=8 << 20)
store.save_checkpoint({}, 0)
# The context manager is left before the signal is sent again, on any machine.
Timer = threading.Timer
threading.Timer = lambda seconds, *how: Timer(10 * seconds, *how)
def told(done, total):
    if s4weights._core.nesting():  # Other reports are made outside of the call.
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        print(sum(isinstance(one, Timer) for one in threading.enumerate()))
        sys.stdout.flush()
with s4weights.finish_on_sigterm(store, 200):
    store.save_checkpoint({"w": torch.randn(4 << 20)}, 1, blocking=False)
    s4weights.load(url + "/file", progress=told)
time.sleep(600)
"""


def test_sigterm_comes_in_the_last_call(tmp_path: Path) -> None:
    """The signal would be sent again after the context manager has ended."""
    done = run(LEFT_SOON, tmp_path)
    assert done.returncode == -signal.SIGTERM and done.stdout == "1\n", done.stderr
    with CheckpointStore(tmp_path / "store") as store:
        assert [entry.step for entry in store.list()] == [0, 1]


@pytest.mark.parametrize(
    "script",
    [COPYING, ELSEWHERE, DCP_HERE, DCP_LATER],
    ids=["copying", "another thread", "dcp", "dcp in the background"],
)
def test_sigterm_comes_early(tmp_path: Path, script: str) -> None:
    """While the tensors of a background save are copied, and while another thread saves."""
    command = [sys.executable, "-c", PREPARE + script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=300)
    assert process.returncode == -signal.SIGTERM
    with CheckpointStore(tmp_path) as store:
        assert [entry.step for entry in store.list()] == [0, 1]
        assert store.verify()["clean"]


def test_sigterm_goes_on_to_the_handler_before(tmp_path: Path) -> None:
    """A handler that lets the program go on can save afterwards: the deadline no longer applies."""
    script = """
store = CheckpointStore(url)
signal.signal(signal.SIGTERM, lambda number, frame: None)
with s4weights.finish_on_sigterm(store, 0.0):
    os.kill(os.getpid(), signal.SIGTERM)
    store.save_checkpoint({"w": torch.arange(1 << 20)}, 1, progress=lambda done, total: None)
store.close()
"""
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr
    with CheckpointStore(tmp_path) as store:
        assert store.latest() == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_while_a_save_is_pending(tmp_path: Path) -> None:
    script = """
store = CheckpointStore(url, bandwidth=8 << 20)
store.save_checkpoint({"w": torch.arange(5000)}, 1)
forked = threading.Event()
def progress(done, total):
    # It does not end before.
    if done == total and not forked.wait(200):
        os._exit(9)
pending = store.save_checkpoint({"w": torch.randn(4 << 20)}, 2, blocking=False, progress=progress)
# Another thread waits for its turn, with locks in whatever state.
threading.Thread(target=lambda: store.save_checkpoint({}, 3)).start()
time.sleep(0.2)
children = []
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        signal.alarm(120)
        for wait in (pending.wait, pending.committed.result):
            try:
                wait()
            except s4weights.S4Error as error:
                assert "forked" in str(error), error
            else:
                raise AssertionError
        # The tensors had been copied.
        pending.staged.result()
        assert pending.done()
        assert store.load_checkpoint(1)["w"][7] == 7
        store.save_checkpoint({"w": torch.arange(6000)}, 100 + len(children))
        store.close()
        sys.exit(0)
    children.append(pid)
for pid in children:
    assert os.waitpid(pid, 0)[1] == 0
forked.set()
assert pending.wait().step == 2
store.close()
"""
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr
    with CheckpointStore(tmp_path) as store:
        assert sorted(entry.step for entry in store.list()) == [1, 2, 3, 100, 101, 102]
        assert store.verify()["clean"]
