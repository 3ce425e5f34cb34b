"""Reports of saves and loads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import s4weights
import s4weights.numpy
from s4weights import Report
from s4weights.dcp import StorageReader, StorageWriter
from s4weights.sync import Publisher, Subscriber

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def reports() -> Iterator[list[Report]]:
    """The reports that are made while a test runs."""
    told: list[Report] = []
    remove = s4weights.add_reporter(told.append)
    yield told
    remove()


def state(step: int) -> dict[str, torch.Tensor]:
    weights = torch.randn(200, 100, generator=torch.Generator().manual_seed(1))
    weights[step] += 1
    return {"w": weights, "half": weights[:50].to(torch.bfloat16)}


RAW = 200 * 100 * 4 + 50 * 100 * 2


def check(report: Report, stages: list[str]) -> None:
    """Checks what holds for every report of a success."""
    assert report.error is None and list(report.stages) == stages, report
    assert all(seconds >= 0 for seconds in report.stages.values())
    assert 0 < sum(report.stages.values()) <= report.seconds
    if report.stored_bytes is not None:
        assert report.ratio == report.raw_bytes / report.stored_bytes


def test_files(tmp_path: Path, reports: list[Report]) -> None:
    path = tmp_path / "x.s4w"
    s4weights.save(state(1), path)
    s4weights.save(state(1), path, blocking=False).wait()
    s4weights.load(path)
    s4weights.load(path, keys=["half"])
    saved, later, loaded, part = reports
    for report, stages in [
        (saved, ["encode", "publish"]),
        (later, ["stage", "encode", "publish"]),
        (loaded, ["open", "read"]),
        (part, ["open", "read"]),
    ]:
        check(report, stages)
        assert (report.target, report.step, report.rank, report.chain) == (str(path), None, None, 1)
        assert report.stored_bytes == (None if report is part else path.stat().st_size)
    assert saved.raw_bytes == later.raw_bytes == loaded.raw_bytes == RAW
    assert part.raw_bytes == 50 * 100 * 2
    assert [r.action for r in reports] == ["save", "save", "load", "load"]
    with pytest.raises(s4weights.NotFoundError) as missing:
        s4weights.save(state(1), tmp_path / "missing" / "x.s4w")
    assert (reports[-1].action, reports[-1].error) == ("save", missing.value)
    with pytest.raises(s4weights.NotFoundError) as missing:
        s4weights.load(tmp_path / "missing.s4w")
    assert (reports[-1].action, reports[-1].error) == ("load", missing.value)
    path.write_bytes(path.read_bytes()[:2000] + b"\0" * 50 + path.read_bytes()[2050:])
    with pytest.raises(s4weights.CorruptDataError) as failed:
        s4weights.load(path)
    assert reports[-1].error is failed.value and "failed after" in str(reports[-1])


def test_tensors_filled_in_place(tmp_path: Path, reports: list[Report]) -> None:
    path = tmp_path / "x.s4w"
    s4weights.save(state(1), path)
    s4weights.load_into(state(2), path)
    s4weights.load_into({"half": state(2)["half"]}, path, strict=False)
    for report in reports[1:]:
        check(report, ["open", "read"])
        assert (report.action, report.target, report.chain) == ("load", str(path), 1)
    whole, part = reports[1:]
    assert whole.raw_bytes == RAW and whole.stored_bytes == path.stat().st_size
    assert part.raw_bytes == 50 * 100 * 2 and part.stored_bytes is None
    with pytest.raises(s4weights.MismatchError) as differs:
        s4weights.load_into({"half": state(2)["half"]}, path)
    assert len(reports) == 4 and reports[-1].error is differs.value


def test_arrays(tmp_path: Path, reports: list[Report]) -> None:
    path = tmp_path / "x.s4w"
    s4weights.numpy.save({"a": np.ones(50), "b": np.ones((5, 7))}, path)
    s4weights.numpy.load(path)
    s4weights.numpy.load(path, keys=["b"])
    saved, loaded, part = reports
    check(saved, ["encode", "publish"])
    for report in (loaded, part):
        check(report, ["open", "read"])
    assert saved.action == "save" and saved.raw_bytes == loaded.raw_bytes == 680
    assert saved.stored_bytes == loaded.stored_bytes == path.stat().st_size
    assert part.raw_bytes == 280 and part.stored_bytes is None
    with pytest.raises(s4weights.UnsupportedFormatError) as other:
        s4weights.numpy.save({"a": object()}, path)
    assert reports[-1].error is other.value


def test_what_cannot_be_described_is_reported_once(tmp_path: Path, reports: list[Report]) -> None:
    cannot = {"lock": threading.Lock(), "w": torch.ones(9)}
    path = tmp_path / "x.s4w"
    with s4weights.CheckpointStore(tmp_path / "store") as store:
        for save in (
            lambda: s4weights.save(cannot, path),
            lambda: s4weights.save(cannot, path, blocking=False),
            lambda: store.save_checkpoint(cannot, 1),
            lambda: store.save_checkpoint(cannot, 2, blocking=False),
            lambda: store.save_checkpoint(cannot, 3, blocking=False, stage="lazy").wait(),
        ):
            with pytest.raises(TypeError) as refused:
                save()
            assert (reports[-1].action, reports[-1].error) == ("save", refused.value)
    assert [report.step for report in reports] == [None, None, 1, 2, 3]


def test_checkpoints(tmp_path: Path, reports: list[Report]) -> None:
    with s4weights.CheckpointStore(tmp_path) as store:
        entries = [store.save_checkpoint(state(step), step) for step in (1, 2)]
        entries.append(store.save_checkpoint(state(3), 3, blocking=False).wait())
        store.load_checkpoint(3)
    assert entries[2].report["stages"].keys() == {"encode", "upload", "publish"}
    for report, entry in zip(reports, entries, strict=False):
        stages = ["encode", "upload", "publish"]
        check(report, stages if entry.step < 3 else ["stage", *stages])
        assert (report.action, report.step) == ("save", entry.step)
        assert report.stored_bytes == entry.bytes and report.raw_bytes == entry.raw_bytes
    check(reports[3], ["open", "read"])
    assert (reports[3].action, reports[3].step, reports[3].chain) == ("load", 3, 2)
    assert "(" in str(reports[3]) and "chain of 2" in str(reports[3])


def test_ranks_and_progress_on_the_first(tmp_path: Path, reports: list[Report]) -> None:
    seen: dict[str, list[tuple[int, int]]] = {"save": [], "load": []}

    def progress(what: str) -> object:
        return lambda done, total: seen[what].append((done, total))

    writer = StorageWriter(tmp_path, step=7, progress=progress("save"))
    empty = {"none": torch.empty(0, 3), "nothing": torch.empty(0, 3)}
    dcp.save({**state(1), **empty}, storage_writer=writer, no_dist=True)
    loaded = {name: torch.zeros_like(t) for name, t in {**state(1), **empty}.items()}
    dcp.load(loaded, storage_reader=StorageReader(tmp_path, progress=progress("load")), no_dist=True)
    saved, read = reports
    check(saved, ["encode"])
    check(read, ["read"])
    for report in reports:
        assert (report.step, report.rank, report.raw_bytes) == (7, 0, RAW)
    assert all(calls[0] == (0, RAW) and calls[-1] == (RAW, RAW) for calls in seen.values())


def test_updates(tmp_path: Path, reports: list[Report]) -> None:
    weights = state(0)
    with Publisher(tmp_path) as publisher, Subscriber(tmp_path, weights) as subscriber:
        for step in (1, 2):
            publisher.publish_delta(state(step), step)
            subscriber.apply_delta()
            subscriber.apply_delta()
    assert [(r.action, r.step) for r in reports] == [
        *[("save", 1), ("apply", 1), ("save", 2), ("apply", 2)]
    ]
    check(reports[1], ["open", "read"])
    check(reports[3], ["apply"])
    assert reports[3].stored_bytes == reports[2].stored_bytes and reports[3].chain == 1


def test_a_reporter_that_fails_harms_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(report: Report) -> None:
        raise ZeroDivisionError

    remove = s4weights.add_reporter(fail)
    with caplog.at_level(logging.INFO, "s4weights"):
        s4weights.save(state(1), tmp_path / "x.s4w")
        remove()
        s4weights.save(state(1), tmp_path / "x.s4w")
    assert [r.message for r in caplog.records].count("a reporter failed") == 1
    lines = [r.message for r in caplog.records if r.name == "s4weights.report" and "stored" in r.message]
    assert len(lines) == 2 and lines[0].startswith(f"save {tmp_path}/x.s4w: 90,000 bytes, ")
    assert "encode" in lines[0] and "x) in " in lines[0]


def test_nobody_asks_and_nothing_is_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from s4weights import _report

    s4weights.save(state(1), tmp_path / "x.s4w")

    def never(*args: object) -> None:
        raise AssertionError("inspected for nobody")

    monkeypatch.setattr(_report.json, "loads", never)
    assert not _report.wanted()
    recorder = _report.Recorder("load", "x")
    recorder.look(object())  # type: ignore[arg-type]
    recorder.finish()
