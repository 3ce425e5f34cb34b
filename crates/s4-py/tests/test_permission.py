"""Saving over a file that belongs to somebody else."""

import os
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import s4weights  # noqa: E402

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="needs root, to be somebody else"
)


def test_a_file_that_this_user_may_not_write_is_not_replaced(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and folder.name.startswith("pytest"):
            folder.chmod(0o777)
    tmp_path.chmod(0o777)
    theirs = tmp_path / "theirs"
    theirs.write_text("precious")
    theirs.chmod(0o644)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgid(65534)
            os.setuid(65534)
            s4weights.save([1], theirs)
        except PermissionError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert theirs.read_text() == "precious"
    # Root may write to any file.
    theirs.chmod(0o444)
    s4weights.save([1], theirs)
    assert s4weights.load(theirs) == [1]
