"""What is refused before anything is written, read or changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from compare import TOO_LONG
from s4weights import CheckpointStore


def files_below(path: Path) -> list[Path]:
    return sorted(path.rglob("*"))


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize(
    ("about", "error"),
    [
        ({"metrics": {"loss": float("nan")}}, ValueError),
        ({"metrics": {"loss": float("inf")}}, ValueError),
        ({"metrics": {"x" * 70_000: 1.0}}, s4weights.LimitError),
        ({"tags": {"note": "x" * 70_000}}, s4weights.LimitError),
        ({"metrics": {"x" * 40_000: 1.0}, "tags": {"x": "x" * 40_000}}, s4weights.LimitError),
    ],
    ids=["nan", "inf", "metrics", "tags", "both"],
)
def test_metrics_and_tags_that_a_store_refuses(
    tmp_path: Path, about: dict[str, Any], error: type[Exception], blocking: bool
) -> None:
    with CheckpointStore(tmp_path) as store:
        store.save_checkpoint({}, 0)
        before = files_below(tmp_path)
        with pytest.raises(error):
            store.save_checkpoint({"w": torch.ones(9)}, 1, blocking=blocking, **about)
        assert files_below(tmp_path) == before
        # The store has the last word.
        with pytest.raises(s4weights.LimitError, match="log entry"):
            store.save_checkpoint({}, 1, TOO_LONG)
        store.save_checkpoint({}, 1, {"x" * 60_000: 1.0})


@pytest.mark.parametrize("step", [True, False, 1.0, b"1"])
def test_what_is_no_step(tmp_path: Path, step: Any) -> None:
    with CheckpointStore(tmp_path) as store:
        for number in (0, 1):
            store.save_checkpoint({}, number)
        for call in (store.delete, store.pin, store.rebase, store.load_checkpoint, store.verify):
            with pytest.raises(ValueError, match="step: an integer or the id of an entry expected"):
                call(step)
        assert [entry.step for entry in store.list()] == [0, 1]
        store.load_checkpoint(torch.tensor(1))  # type: ignore[arg-type]


@pytest.mark.skipif(os.name != "posix", reason="names of files are text there")
def test_a_folder_whose_name_is_not_utf8(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be UTF-8"):
        CheckpointStore(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))


def test_memory_that_several_elements_share(tmp_path: Path) -> None:
    path = tmp_path / "a"
    s4weights.save({"a": torch.arange(6.0).reshape(3, 2)}, path)
    memory = torch.zeros(4)
    with pytest.raises(s4weights.MismatchError, match="`a` may have one place in memory"):
        s4weights.load_into({"a": memory.unfold(0, 2, 1)}, path)
    assert not memory.any()
    for apart in (torch.zeros(2, 3).t(), torch.zeros(3, 4)[:, ::2], torch.zeros(9, 2)[::3]):
        s4weights.load_into({"a": apart}, path)
        assert apart.flatten().tolist() == [*range(6)]


@pytest.mark.skipif(not hasattr(torch, "bcomplex32"), reason="needs torch.bcomplex32")
def test_what_pytorch_cannot_copy(tmp_path: Path) -> None:
    path = tmp_path / "a"
    odd = torch.zeros(2, dtype=torch.bcomplex32)
    s4weights.save({"a": torch.ones(3), "z": odd.conj()}, path)
    target = {"a": torch.zeros(3), "z": odd}
    with pytest.raises(s4weights.MismatchError, match="`z` cannot be copied"):
        s4weights.load_into(target, path)
    assert not target["a"].any()


def test_without_pytorch_the_message_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a"
    s4weights.save({"a": [shared := [1], shared]}, path)
    script = """if True:
        import sys
        sys.modules["torch"] = None
        import s4weights
        store = s4weights.CheckpointStore(sys.argv[1] + ".store")
        for name, call in {
            "get_unsafe_globals": lambda: s4weights.get_unsafe_globals(sys.argv[1]),
            "load_into": lambda: s4weights.load_into({}, sys.argv[1]),
            "load_checkpoint": lambda: store.load_checkpoint(),
            "save_checkpoint": lambda: store.save_checkpoint({}, 1),
        }.items():
            try:
                call()
            except ModuleNotFoundError as error:
                assert f"s4weights.{name} needs PyTorch" in str(error), error
            else:
                raise AssertionError(name)
    """
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)
