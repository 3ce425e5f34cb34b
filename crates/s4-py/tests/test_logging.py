"""Warnings of the native crates reach Python's `logging`; their panics are exceptions."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import s4weights
from s4weights import CheckpointStore, _core


def damage_newest(folder: Path, store: CheckpointStore) -> None:
    """Damages the checkpoint that the next save would be a delta of."""
    newest = store.list()[-1]
    for file in (p for p in folder.rglob("*") if newest.id in str(p) and p.is_file()):
        if file.name != "manifest":
            file.write_bytes(bytes(file.stat().st_size))


def saved_after_damage(folder: Path) -> CheckpointStore:
    state = {"w": torch.arange(100_000)}
    with CheckpointStore(folder) as store:
        store.save_checkpoint(state, 0)
        damage_newest(folder, store)
    store = CheckpointStore(folder, max_chain=4)
    store.save_checkpoint(state, 1)
    return store


def test_warnings_are_logged_by_module(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with saved_after_damage(tmp_path) as store:
        assert store.list()[-1].kind == "base"
    records = [r for r in caplog.records if r.name.startswith("s4weights.store")]
    assert any(
        r.levelno == logging.WARNING and "saving as a base" in r.getMessage() for r in records
    ), caplog.text


def test_levels_are_those_of_logging(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "s4weights"):
        saved_after_damage(tmp_path / "a").close()
    assert not [r for r in caplog.records if r.name.startswith("s4weights.store")]


def test_warnings_reach_stderr_without_any_set_up(tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_logging import saved_after_damage
saved_after_damage(Path({str(tmp_path)!r})).close()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and "saving as a base" in done.stderr


def test_a_handler_may_save_itself(tmp_path: Path) -> None:
    """Handlers run without any lock of the native side held."""
    seen: list[str] = []

    class Saving(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())
            s4weights.save({"w": torch.ones(3)}, tmp_path / "log.s4w")
            assert CheckpointStore(tmp_path / "a").list() is not None

    handler = Saving()
    logger = logging.getLogger("s4weights.store")
    logger.addHandler(handler)
    try:
        saved_after_damage(tmp_path / "a").close()
    finally:
        logger.removeHandler(handler)
    assert any("saving as a base" in text for text in seen)


def test_a_panic_is_an_exception_that_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    problems: list[BaseException] = []

    def panic() -> None:
        try:
            _core.panic_on_purpose()
        except Exception as error:  # Not only a `BaseException`.
            problems.append(error)

    panic()
    # A call from another thread does its work on that thread.
    thread = threading.Thread(target=panic)
    thread.start()
    thread.join()
    assert len(problems) == 2
    for problem in problems:
        assert type(problem) is s4weights.S4Error
        text = str(problem)
        assert "bug in s4weights" in text and "on purpose" in text and "lib.rs" in text
    assert "on purpose" in caplog.text
    # The module works as before.
    codec = _core.TensorCodec("balanced", 1, None)
    with pytest.raises(ValueError):
        codec.compress(1, 8, "float32", (1 << 62, 1 << 62))


@pytest.mark.parametrize("what", ["exception", "exit", "interrupt", "odd", "no exception"])
def test_whatever_a_progress_function_does(tmp_path: Path, what: str) -> None:
    class Odd(BaseException):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    raised: dict[str, BaseException] = {
        "exception": ZeroDivisionError("x"),
        "exit": SystemExit(3),
        "interrupt": KeyboardInterrupt(),
        "odd": Odd(),
    }

    def progress(done: int, total: int) -> object:
        if done and what in raised:
            raise raised[what]
        return object()

    state = {"w": torch.rand(1 << 20)}
    with CheckpointStore(tmp_path / "store") as store:
        store.save_checkpoint(state, 0)
        for work in (
            lambda: s4weights.save(state, tmp_path / "a.s4w", progress=progress),
            lambda: store.save_checkpoint(state, 1, progress=progress),
            lambda: store.load_checkpoint(0, progress=progress),
        ):
            if what in raised:
                with pytest.raises(type(raised[what])):
                    work()
            else:
                work()
        store.save_checkpoint(state, 2)
        assert torch.equal(store.load_checkpoint()["w"], state["w"])


def test_an_error_of_the_system_has_its_number(tmp_path: Path) -> None:
    import errno
    import pickle

    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(s4weights.S4Error) as raised:
        s4weights.save({}, file / "x.s4w")
    assert isinstance(raised.value, OSError) and raised.value.errno == errno.ENOTDIR
    assert raised.value.filename is not None
    assert raised.value.cause == "NotADirectory"
    full = s4weights.StorageError(errno.ENOSPC, "No space left on device", "a/b")
    assert "a/b" in str(full) and full.cause is None
    assert pickle.loads(pickle.dumps(full)).errno == errno.ENOSPC


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    import errno
    import os

    if os.getuid() == 0:
        # Root always has permission, so a file in place of the folder causes the error.
        (tmp_path / "s").write_bytes(b"")
        with pytest.raises(s4weights.S4Error) as raised:
            CheckpointStore(tmp_path / "s").save_checkpoint({}, 0)
        assert isinstance(raised.value, OSError)
        assert raised.value.errno in (errno.ENOTDIR, errno.EEXIST)
        return
    (tmp_path / "s").mkdir(0o500)
    with pytest.raises(s4weights.StorageError) as raised_here:
        CheckpointStore(tmp_path / "s").save_checkpoint({}, 0)
    assert raised_here.value.errno == errno.EACCES and "permissions" in str(raised_here.value)
