"""Calls that are refused before anything is written, read or changed."""

from __future__ import annotations

import inspect
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import s4weights
import s4weights.numpy
from compare import TOO_LONG
from s4weights import CheckpointStore, finish_on_sigterm
from s4weights.sync import Publisher, Subscriber


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


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize(
    ("metadata", "error"),
    [({"epoch": 3}, TypeError), ({3: "x"}, TypeError), ("x", TypeError), ({"a": "\ud800"}, ValueError)],
    ids=["number", "key", "text", "surrogate"],
)
def test_metadata_is_checked_before_anything_is_written(
    tmp_path: Path, metadata: Any, error: type[Exception], blocking: bool
) -> None:
    stream = io.BytesIO()
    state = {"w": torch.ones(100_000)}
    with pytest.raises(error, match="metadata"):
        s4weights.save(state, stream, metadata=metadata, blocking=blocking)
    with pytest.raises(error, match="metadata"):
        s4weights.numpy.save({"w": state["w"].numpy()}, stream, metadata=metadata)
    assert not stream.getvalue()
    with CheckpointStore(tmp_path) as store:
        with pytest.raises(error, match="metadata"):
            store.save_checkpoint(state, 1, metadata=metadata, blocking=blocking)
        with pytest.raises(ValueError, match="tags"):
            store.save_checkpoint(state, 1, tags={"a": "\ud800"}, blocking=blocking)
        assert store.list() == []


def test_an_argument_of_the_wrong_kind_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a"
    s4weights.save({"w": torch.ones(2)}, path)
    wrong: Any = "x"
    with CheckpointStore(tmp_path / "store") as store:
        calls: list[tuple[str, Callable[[], Any]]] = [
            ("trusted='x'", lambda: s4weights.load(path, trusted=wrong)),
            ("keys=5", lambda: s4weights.load(path, keys=cast(Any, 5))),
            ("base=1", lambda: store.save_checkpoint({}, 1, base=cast(Any, 1))),
            ("dry_run=0", lambda: store.gc(cast(Any, 0))),
            ("grace='x'", lambda: store.gc(grace=wrong)),
            ("grace=nan", lambda: store.gc(grace=float("nan"), exclusive=True)),
            ("read_data='x'", lambda: store.verify(read_data=wrong)),
            ("ids=999", lambda: store.undelete(cast(Any, 999))),
            ("timeout='x'", lambda: CheckpointStore(tmp_path / "b", timeout=wrong)),
            ("timeout=0", lambda: CheckpointStore(tmp_path / "b", timeout=0)),
            ("best=5", lambda: s4weights.Retention(best=cast(Any, 5))),
            ("metrics: 'a' is None", lambda: store.save_checkpoint({}, 1, {"a": cast(Any, None)})),
            ("metrics: 'a' is 1000", lambda: store.save_checkpoint({}, 1, {"a": 10**400})),
            ("listen=5", lambda: Publisher(tmp_path / "c", listen=cast(Any, 5))),
            ("deadline='30'", lambda: finish_on_sigterm(store, cast(Any, "30")).__enter__()),
            ("blocking='x'", lambda: store.save_checkpoint({}, 1, blocking=wrong)),
            ("blocking='x'", lambda: s4weights.save({}, path, blocking=wrong)),
            ("fallback='x'", lambda: store.load_checkpoint(fallback=wrong)),
            ("read_only='x'", lambda: CheckpointStore(tmp_path / "b", read_only=wrong)),
            (
                "allow_network_fs='x'",
                lambda: CheckpointStore(tmp_path / "b", allow_network_fs=wrong),
            ),
            ("timeout=nan", lambda: Subscriber("tcp://h:1", {}, timeout=float("nan"))),
            ("timeout='x'", lambda: Subscriber("tcp://h:1", {}, timeout=wrong)),
            ("deadline=-5", lambda: finish_on_sigterm(store, -5).__enter__()),
        ]
        for named, call in calls:
            with pytest.raises((TypeError, ValueError), match=re.escape(named)):
                call()
        assert store.list() == []
    weights = {"w": torch.ones(2)}
    with Publisher(tmp_path / "weights") as publisher:
        publisher.publish_delta(weights, 1)
        with Subscriber(tmp_path / "weights", weights) as subscriber:
            with pytest.raises(TypeError, match="wait='x'"):
                subscriber.apply_delta(wait=wrong)
            assert subscriber.apply_delta() is not None


def test_what_is_not_the_files_fault_is_not_called_damage(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        store.save_checkpoint({"w": torch.ones(3)}, 1)
        nested: Any = {"w": torch.zeros(3)}
        for _ in range(28):
            nested = {"k": nested}
        store.save_checkpoint(nested, 2)
        # A function that returns no storage.
        for fallback in (False, True):
            with pytest.raises(TypeError, match="map_location returned"):
                store.load_checkpoint(map_location=lambda *_: torch.ones(3), fallback=fallback)

        def deep(levels: int) -> Any:
            return deep(levels - 1) if levels else store.load_checkpoint(fallback=True)

        # Where so few frames are left, it may work or not, but an older checkpoint is no answer.
        for left in range(40, 160, 20):
            try:
                found = deep(sys.getrecursionlimit() - len(inspect.stack()) - left)
            except RecursionError:
                continue
            assert "w" not in found


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_the_systems_number_is_kept_if_no_file_can_be_created(tmp_path: Path) -> None:
    program = """
import errno, resource, sys, torch, s4weights
state = {"w": torch.ones(5)}
s4weights.save(state, sys.argv[1])
before = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
try:
    s4weights.save(state, sys.argv[1])
except s4weights.StorageError as error:
    assert (error.errno, error.filename) == (errno.EMFILE, sys.argv[1]), error
else:
    raise SystemExit("nothing was refused")
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "a")], check=True)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda: torch.ones(2)[1:].view([1] * 65), id="65 dimensions"),
        pytest.param(lambda: torch.ones(1).view([1] * 65), id="whole, 65 dimensions"),
        pytest.param(lambda: torch.ones(1).expand(2**61), id="2^63 bytes"),
        pytest.param(lambda: torch.ones(1).expand(2**61 - 1), id="nearly 2^63 bytes"),
        pytest.param(lambda: torch.ones(0).reshape([0] * 65), id="empty, 65 dimensions"),
    ],
)
def test_views_of_any_size_come_back(view: Callable[[], torch.Tensor]) -> None:
    stream, tensor = io.BytesIO(), view()
    s4weights.save({"w": torch.arange(5.0), "v": tensor}, stream)
    stream.seek(0)
    found = s4weights.load(stream)
    assert (found["v"].shape, found["v"].stride()) == (tensor.shape, tensor.stride())
    assert found["w"].tolist() == [*range(5)]
    if 0 < tensor.numel() < 9:
        assert found["v"].item() == 1


@pytest.mark.parametrize("step", [True, False, 1.0, b"1"])
def test_what_is_no_step(tmp_path: Path, step: Any) -> None:
    with CheckpointStore(tmp_path) as store:
        for number in (0, 1):
            store.save_checkpoint({}, number)
        for call in (store.delete, store.pin, store.rebase, store.load_checkpoint, store.verify):
            with pytest.raises(ValueError, match="step: expected an integer or the id of an entry"):
                call(step)
        assert [entry.step for entry in store.list()] == [0, 1]
        store.load_checkpoint(torch.tensor(1))  # type: ignore[arg-type]


@pytest.mark.skipif(os.name != "posix", reason="names of files are text there")
def test_a_folder_whose_name_is_not_utf8(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be valid UTF-8"):
        CheckpointStore(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))


def test_memory_that_several_elements_share(tmp_path: Path) -> None:
    path = tmp_path / "a"
    s4weights.save({"a": torch.arange(6.0).reshape(3, 2)}, path)
    memory = torch.zeros(4)
    with pytest.raises(s4weights.MismatchError, match="`a` may have several elements at the same memory location"):
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
