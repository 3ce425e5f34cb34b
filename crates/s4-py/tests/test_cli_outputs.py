"""The files that the command ``s4w`` of the wheel must not replace, its messages and its exit
codes.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from test_cli import main, run, state  # noqa: E402

import s4weights  # noqa: E402
from s4weights import _cli  # noqa: E402

pytestmark = pytest.mark.skipif(os.name == "nt", reason="pipes, links and permissions of Unix")


def shell(script: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in which ``s4w`` is the program."""
    lines = f's4w() {{ "{sys.executable}" -m s4weights "$@"; }}\n{script}'
    words = ["bash", "-c", lines, "bash", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, env={**os.environ, **environment})


def test_what_may_not_be_written_to_is_not_replaced(tmp_path: Path, monkeypatch: Any) -> None:
    s4weights.save(state(), tmp_path / "a.s4w")
    target = tmp_path / "b.pt"
    target.write_text("mine")
    # Root may write to any file.
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    code, said = main("decompress", str(tmp_path / "a.s4w"), str(target), "-f")
    assert code == 3 and said == f"s4w: {target}: Permission denied\n", said
    assert target.read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.s4w", "b.pt"]


def test_pipes_and_links_stay(tmp_path: Path) -> None:
    s4weights.save(state(), tmp_path / "a.s4w")
    pipe, link = tmp_path / "pipe.pt", tmp_path / "link.pt"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    code, said = main("decompress", str(tmp_path / "a.s4w"), str(pipe))
    assert code == 0 and pipe.is_fifo(), said
    reader.join(60)
    (tmp_path / "read.pt").write_bytes(read[0])
    assert torch.load(tmp_path / "read.pt")["step"] == 7
    # A pipe without a path.
    if os.path.exists("/proc/self/fd/1"):
        (tmp_path / "out.pt").symlink_to("/proc/self/fd/1")
        script = 's4w decompress "$1/a.s4w" "$1/out.pt" -q | head -c 2'
        out = shell(script, tmp_path)
        assert out.stdout == "PK", out
    # It leads nowhere yet.
    link.symlink_to("there")
    assert main("decompress", str(tmp_path / "a.s4w"), str(link))[0] == 0
    assert link.is_symlink() and torch.load(tmp_path / "there")["step"] == 7


def test_a_private_file_is_private_at_all_times(tmp_path: Path, monkeypatch: Any) -> None:
    s4weights.save(state(), tmp_path / "a.s4w")
    target = tmp_path / "b.pt"
    target.write_text("mine")
    target.chmod(0o600)
    seen: list[int] = []
    save = torch.save

    def look(obj: object, file: Any) -> None:
        seen.append(os.fstat(file.fileno()).st_mode & 0o777)
        save(obj, file)

    monkeypatch.setattr(torch, "save", look)
    assert main("decompress", str(tmp_path / "a.s4w"), str(target), "-f")[0] == 0
    assert seen == [0o600] and target.stat().st_mode & 0o777 == 0o600


def test_errors_name_the_output_however_long_its_name_is(tmp_path: Path, monkeypatch: Any) -> None:
    s4weights.save(state(), tmp_path / "a.s4w")
    # As long as file systems allow, in characters of three bytes.
    target = tmp_path / f"{'€' * 84}.pt"
    code, said = main("decompress", str(tmp_path / "a.s4w"), str(target))
    assert code == 0, said
    target = tmp_path / f"{'€' * 90}.pt"
    code, said = main("decompress", str(tmp_path / "a.s4w"), str(target))
    assert code == 3 and said.startswith(f"s4w: {target}: "), said

    def fail(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr(Path, "replace", fail)
    monkeypatch.setattr(Path, "unlink", fail)
    for flags in ([], ["--force"]):
        code, said = main("decompress", *flags, str(tmp_path / "a.s4w"), str(tmp_path / "b.pt"))
        assert code == 3 and said == f"s4w: {tmp_path / 'b.pt'}: no\n", said


def test_a_pipe_is_no_input(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.pt"
    os.mkfifo(pipe)
    for words in (
        ("compress", str(pipe)),
        ("compress", "/dev/null", str(tmp_path / "b.s4w")),
        ("decompress", str(pipe)),
        ("decompress", str(pipe), str(tmp_path / "b.pt")),
        ("decompress", str(pipe), str(tmp_path / "b.safetensors")),
        ("decompress", f"file://{pipe}", str(tmp_path / "b.safetensors")),
    ):
        out = run(*words)
        assert out.returncode == 2 and "a pipe or a device" in out.stderr, (words, out.stderr)
    assert [p.name for p in tmp_path.iterdir()] == ["pipe.pt"]


def test_a_name_without_a_known_ending_keeps_all_of_it(tmp_path: Path) -> None:
    s4weights.save(state(), tmp_path / "step.1000")
    assert main("decompress", str(tmp_path / "step.1000"))[0] == 0
    assert main("compress", str(tmp_path / "step.1000.pt"))[0] == 0
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["step.1000", "step.1000.pt", "step.1000.s4w"]


def test_nothing_is_restored_into_the_store_that_is_read(tmp_path: Path) -> None:
    with s4weights.CheckpointStore(str(tmp_path / "runs")) as store:
        store.save_checkpoint(state(), 1)
    mine = tmp_path / "runs" / "a.pt"
    mine.write_text("mine")
    (tmp_path / "link.pt").symlink_to(mine)
    for target in (mine, tmp_path / "link.pt", tmp_path / "runs" / ".." / "runs" / "b.pt"):
        code, said = main("store", "restore", str(tmp_path / "runs"), "latest", str(target), "-f")
        assert code == 2 and "in the store that is read" in said, said
    assert mine.read_text() == "mine"


def test_a_url_is_the_file_that_its_parser_finds(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "a.pt")
    (tmp_path / "b.s4w").write_text("mine")
    for between in ("\\", "/no/../", "/%2E/", "/\t"):
        url = f"file://{tmp_path}{between}"
        code, said = main("compress", str(tmp_path / "a.pt"), f"{url}b.s4w")
        assert code == 5 and "exists already" in said, said
        code, said = main("compress", str(tmp_path / "a.pt"), f"{url}a.pt", "-f")
        assert code == 2 and "the same file" in said, said
        assert main("compress", str(tmp_path / "a.pt"), f"{url}c.s4w", "-f")[0] == 0
        (tmp_path / "c.s4w").unlink()
    assert (tmp_path / "b.s4w").read_text() == "mine"
    for url, path in (
        (" FILE://localhost/a%20b/../c%25", "/c%"),
        ("file:///a/..", "/"),
        ("file:///../a/./b/", "/a/b/"),
        ("file:///a//b", "/a//b"),
        ("file://elsewhere/a", None),
        ("s3://bucket/a", None),
        ("a\\b", "a\\b"),
    ):
        assert _cli._local(url) == path, url


def test_a_cut_file_is_damaged_and_has_a_name(tmp_path: Path, monkeypatch: Any) -> None:
    torch.save(state(), tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    cut = tmp_path / "cut.pt"
    for end in (5000, len(whole) // 2, len(whole) - 100, len(whole) - 5):
        cut.write_bytes(whole[:end])
        code, said = main("compress", str(cut))
        assert code == 1 and said.startswith(f"s4w: {cut}: damaged"), (end, said)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(torch, "load", fail)
    code, said = main("compress", str(tmp_path / "a.pt"))
    assert code == 3 and said == f"s4w: {tmp_path / 'a.pt'}: Input/output error\n", said


def test_wrong_usage_has_its_exit_code(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "a.pt")
    s4weights.save(state(), tmp_path / "a.s4w")
    source, target = str(tmp_path / "a.pt"), str(tmp_path / "b.pt")
    for line in (
        ["compress", source, "foo://x/y"],
        ["decompress", "foo://x/y", target],
        ["compress", source, str(tmp_path / "b.s4w"), "--threads", "9" * 30],
        ["compress", source, str(tmp_path / "b.s4w"), "--preset"],
        ["compress", source, str(tmp_path / "b.s4w"), "--preset="],
        ["store", "restore", "-o", "bogus=1", "s3://bucket/x", "latest", target],
        ["store", "restore", str(tmp_path), "latest", target, "-o"],
    ):
        code, said = main(*line)
        assert code == 2 and said.startswith("s4w: ") and len(said.splitlines()) == 1, (line, said)
    # The native program says it where PyTorch is needed only for some files.
    out = run("decompress", "foo://x/y", str(tmp_path / "b.safetensors"))
    assert out.returncode == 2 and out.stderr.startswith("s4w: foo://x/y: "), out.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt", "a.s4w"]


def test_the_time_for_requests_is_taken_where_it_counts(tmp_path: Path, monkeypatch: Any) -> None:
    s4weights.save_checkpoint(state(), str(tmp_path / "store"), 1)
    s4weights.save(state(), tmp_path / "a.s4w")
    store = ["store", "restore", str(tmp_path / "store"), "1", "-f"]
    given: list[Any] = []
    begin = s4weights.CheckpointStore.__init__

    def note(self: Any, *arguments: Any, **options: Any) -> None:
        given.append(options.get("timeout"))
        begin(self, *arguments, **options)

    monkeypatch.setattr(s4weights.CheckpointStore, "__init__", note)
    for words in (["--timeout", "7.5"], ["--timeout=7.5"]):
        assert main(*store, str(tmp_path / "b.pt"), *words)[0] == 0
    assert given == [7.5, 7.5]
    assert main("decompress", str(tmp_path / "a.s4w"), str(tmp_path / "c.pt"), "--timeout", "1")[0] == 0
    for wrong in ("0", "-1", "nan", "soon", "86401"):
        code, said = main(*store, str(tmp_path / "b.pt"), f"--timeout={wrong}")
        assert code == 2 and "at most a day" in said, said
    # Nothing that has no effect is taken.
    code, said = main("decompress", "s3://bucket/a.s4w", str(tmp_path / "d.pt"), "--timeout", "1")
    assert code == 2 and "--timeout" in said, said


def test_streams_change_no_exit_code(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "a.pt")
    compress = 's4w compress "$1/a.pt" "$1/$2" -f'
    cases = {
        "a.s4w": f"{compress} | true; exit ${{PIPESTATUS[0]}}",
        "b.s4w": f"{compress} >&-",
        "c.s4w": f"{compress} -v 2>&-",
        "d.s4w": f"{compress} -v <&- >&- 2>&-",
    }
    for name, script in cases.items():
        out = shell(script, tmp_path, name)
        assert out.returncode == 0, (script, out.stderr)
        s4weights.verify(tmp_path / name)
    out = shell(compress, tmp_path, "é.s4w", PYTHONIOENCODING="ascii")
    assert out.returncode == 0 and "\\xe9.s4w: 2 tensors" in out.stdout, out
    if os.path.exists("/dev/full"):
        out = shell(f"{compress} > /dev/full", tmp_path, "a.s4w")
        assert (out.returncode, out.stderr) == (3, "s4w: standard output: No space left on device\n")


def test_a_name_of_two_lines_is_told_in_one(tmp_path: Path) -> None:
    code, said = main("compress", str(tmp_path / "a\ns4w: forged\t\r.pt"))
    assert code == 3 and len(said.splitlines()) == 1, said
    assert "a\\ns4w: forged\\t\\r.pt" in said


#: Runs the command line, and sends this process a signal when a file is looked at.
SIGNALLED = """
import os, signal, sys, time
from s4weights import _cli

def look(*_):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)

_cli.open_source = look
sys.exit(_cli.main(sys.argv[1:]))
"""


def test_a_signal_counts_before_the_work_begins(tmp_path: Path) -> None:
    words = ["decompress", str(tmp_path / "a.s4w"), str(tmp_path / "b.safetensors")]
    out = subprocess.run(
        [sys.executable, "-c", SIGNALLED, *words],
        capture_output=True,
        text=True,
        # If tests run in the background, it may be ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (out.returncode, out.stderr) == (128 + signal.SIGINT, "s4w: interrupted\n"), out.stderr


def test_no_memory_has_a_code_of_its_own_wherever_it_is_missing(
    tmp_path: Path, monkeypatch: Any
) -> None:
    torch.save(state(), tmp_path / "a.pt")
    s4weights.save(state(), tmp_path / "b.s4w")
    refused = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    def fails(error: Exception) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            raise error

        return call

    for error in (MemoryError(), refused, OSError(errno.ENOMEM, "Cannot allocate memory")):
        with monkeypatch.context() as patch:
            patch.setattr(s4weights, "save", fails(error))
            code, said = main("compress", str(tmp_path / "a.pt"), str(tmp_path / "o.s4w"))
            assert code == 6 and "not enough memory" in said, said
    with monkeypatch.context() as patch:
        # What `load` makes of it is an error of ours.
        patch.setattr(torch, "empty", fails(refused))
        patch.setattr(torch, "UntypedStorage", fails(refused))
        code, said = main("decompress", str(tmp_path / "b.s4w"), str(tmp_path / "o.pt"))
        assert code == 6 and "not enough memory" in said, said
    dist_checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    dist_checkpoint.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "folder", no_dist=True)
    monkeypatch.setattr(torch, "load", fails(refused))
    code, said = main("compress", str(tmp_path / "folder"), str(tmp_path / "o.s4w"))
    assert code == 6 and "not enough memory" in said, said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt", "b.s4w", "folder"]


@pytest.mark.parametrize("source", ["a.pt", "folder"])
@pytest.mark.parametrize("force", [False, True])
def test_what_appears_while_it_compresses_is_kept(
    tmp_path: Path, monkeypatch: Any, source: str, force: bool
) -> None:
    torch.save(state(), tmp_path / "a.pt")
    dist_checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    dist_checkpoint.save(state(), checkpoint_id=tmp_path / "folder", no_dist=True)
    before = {path.name for path in tmp_path.iterdir()}
    target = tmp_path / "b.s4w"
    save = s4weights.save

    def late(*arguments: Any, **options: Any) -> Any:
        target.write_text("mine")
        return save(*arguments, **options)

    monkeypatch.setattr(s4weights, "save", late)
    flags = ["--force"] if force else []
    for name in (str(target), f"file://{target}"):
        code, said = main("compress", str(tmp_path / source), name, *flags)
        if force:
            assert code == 0, said
            s4weights.verify(target)
        else:
            assert code == 5 and "exists already; --force replaces it" in said, said
            assert target.read_text() == "mine"
        assert {path.name for path in tmp_path.iterdir()} == before | {"b.s4w"}
        target.unlink()


def test_a_compressed_file_is_the_same_with_and_without_force(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "a.pt")
    for name, flags in (("b.s4w", []), ("c.s4w", ["--force"])):
        code, said = main("compress", str(tmp_path / "a.pt"), str(tmp_path / name), *flags)
        assert code == 0 and "2 tensors" in said, said
    assert (tmp_path / "b.s4w").read_bytes() == (tmp_path / "c.s4w").read_bytes()
    assert (tmp_path / "b.s4w").stat().st_mode == (tmp_path / "c.s4w").stat().st_mode
