"""What the batch script must do, and what it and the pods tell trainers."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from template import DEPLOY


class Job:
    """The batch script with stand-ins for the runner and the trainer."""

    def __init__(
        self,
        tmp_path: Path,
        says: str = "drained open=0 seconds=0.2",
        code: int = 3,
        environment: dict[str, str] | None = None,
        handles_usr1: bool = True,
    ):
        bin = tmp_path / "bin"
        bin.mkdir()
        self.log = log = tmp_path / "log"
        log.unlink(missing_ok=True)
        self.staging = tmp_path / "s4weights-7"
        body = """#!/bin/bash
echo $$ > {log}.{0}
{usr1}
trap 'echo {0} term >> {log}; {end}' TERM
echo {0} "$@" >> {log}
{work}
"""
        forever = "while true; do sleep 0.05; done"
        # Until the test has seen what it waits for; minutes later if it failed before.
        self.may_end = tmp_path / "may-end"
        self.may_end.unlink(missing_ok=True)
        once = f"for _ in $(seq 6000); do [ -e {self.may_end} ] && break; sleep 0.05; done; exit {code}"
        drain = f'sleep 0.3; echo " INFO {says}" >&2; echo s4w done >> {log}; exit 0'
        for name, work, end in (("s4w", forever, drain), ("train", once, "exit 9")):
            usr1 = f"trap 'echo {name} usr1 >> {log}' USR1"
            if name == "train" and not handles_usr1:
                usr1 = ""
            (bin / name).write_text(body.format(name, log=log, work=work, end=end, usr1=usr1))
            (bin / name).chmod(0o755)
        self.process = subprocess.Popen(
            [str(DEPLOY / "slurm" / "train.sbatch"), "--epochs", "1"],
            env={
                "PATH": f"{bin}:/usr/bin:/bin",
                "STORE": "s3://b/r",
                "SLURM_JOB_ID": "7",
                "SLURM_TMPDIR": str(tmp_path),
                "SLURMD_NODENAME": "node-1",
                "STATE_DIR": str(tmp_path / "state"),
                "HOME": str(tmp_path),
                "TMPDIR": str(tmp_path),
                "TRAIN": "train",
                **(environment or {}),
            },
            stderr=subprocess.PIPE,
            text=True,
        )

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def started(self) -> None:
        self.until(lambda lines: len(lines) >= 2)
        # Until it has set its own traps.
        status, wanted = Path(f"/proc/{self.process.pid}/status"), (signal.SIGUSR1, signal.SIGTERM)
        if status.exists():
            masks = re.compile(r"(?m)^SigCgt:\s*(\w+)$")
            caught = lambda: int(masks.findall(status.read_text())[0], 16)  # noqa: E731
            self.until(lambda _: all(caught() >> (number - 1) & 1 for number in wanted))
        time.sleep(0.3)

    def until(self, is_so: Callable[[list[str]], bool]) -> None:
        end = time.monotonic() + 120
        while not is_so(self.lines()):
            assert time.monotonic() < end
            time.sleep(0.02)

    def ended(self) -> tuple[int, str]:
        self.until(lambda lines: len(lines) >= 2 or self.process.poll() is not None)
        self.may_end.touch()
        _, said = self.process.communicate(timeout=120)
        return self.process.returncode, said


def test_a_batch_job_relays_the_signal_and_waits_for_the_runner(tmp_path: Path) -> None:
    job = Job(tmp_path, environment={"TRAIN_SIGNAL": "USR1"})
    job.started()
    assert job.staging.stat().st_mode & 0o7777 == 0o700
    (job.staging / "local").mkdir()
    job.process.send_signal(signal.SIGUSR1)
    job.until(lambda lines: {"s4w usr1", "train usr1"} <= set(lines))
    code, said = job.ended()
    assert code == 3, "the trainer's own code"
    lines = job.lines()
    assert "s4w usr1" in lines and "train usr1" in lines
    assert "train --epochs 1" in lines
    assert lines[-2:] == ["s4w term", "s4w done"]
    assert any(line.startswith("s4w serve --store s3://b/r ") for line in lines)
    assert "drained open=0" in said and "NOT ALL" not in said
    assert not job.staging.exists(), "all of it is durable"
    assert not list(tmp_path.glob("tmp.*"))
    assert not (tmp_path / "state/places").exists()


@pytest.mark.parametrize("handles", [True, False])
@pytest.mark.parametrize("environment", [{}, {"TRAIN_SIGNAL": ""}])
def test_a_batch_job_does_not_signal_a_trainer_that_did_not_ask_for_it(
    tmp_path: Path, handles: bool, environment: dict[str, str]
) -> None:
    job = Job(tmp_path, environment=environment, handles_usr1=handles)
    job.started()
    job.process.send_signal(signal.SIGUSR1)
    job.until(lambda lines: "s4w usr1" in lines)
    time.sleep(0.3)
    code, _ = job.ended()
    # 128 + 10 if the signal had killed it.
    assert code == 3, "the trainer went on to its own end"
    assert "s4w usr1" in job.lines() and "train usr1" not in job.lines()


def test_a_batch_job_refuses_what_is_no_signal(tmp_path: Path) -> None:
    job = Job(tmp_path, environment={"TRAIN_SIGNAL": "yes"})
    code, said = job.ended()
    assert code == 78 and "TRAIN_SIGNAL=yes" in said
    assert not job.log.exists()


def test_what_trainers_are_told_to_call_exists() -> None:
    package = DEPLOY.parent / "crates" / "s4-py" / "python" / "s4weights"
    client = (package / "_runner.py").read_text()
    assert re.search(r"(?m)^    def interruption\(self, timeout: float = 0\.0\)", client)
    store = (package / "_store.py").read_text()
    assert re.search(r"(?m)^        runner: str \| None = None,$", store)
    assert re.search(r"(?m)^        self\.runner = None if runner is None else RunnerClient", store)
    for name in ("slurm/train.sbatch", "README.md"):
        assert "store.runner.interruption()" in (DEPLOY / name).read_text(), name


def test_whoever_sets_the_variable_says_that_the_trainer_passes_it_on() -> None:
    files = [p for p in DEPLOY.rglob("*") if p.is_file() and "tests" not in p.parts]
    texts = {str(p.relative_to(DEPLOY)): p.read_text() for p in files}
    naming = {name for name, text in texts.items() if "S4W_RUNNER" in text}
    chart = {"helm/s4w-runner/values.yaml", "helm/s4w-runner/templates/NOTES.txt"}
    assert {"README.md", "slurm/train.sbatch", "helm/sidecar.yaml"} | chart <= naming
    for name in naming:
        assert 'CheckpointStore(url, runner=os.environ["S4W_RUNNER"])' in texts[name], name


@pytest.mark.parametrize(
    ("says", "code", "exits"),
    [
        ("drained open=2 seconds=90", 0, 75),
        ("drained open=2 seconds=90", 3, 3),
        ("drained open=01 seconds=90", 0, 75),
        ("nothing that is known", 0, 75),
    ],
)
def test_a_batch_job_says_where_open_checkpoints_are(
    tmp_path: Path, says: str, code: int, exits: int
) -> None:
    job = Job(tmp_path, says, code)
    done, said = job.ended()
    assert done == exits
    for part in ("NOT ALL", "node-1", str(job.staging), str(tmp_path / "state")):
        assert part in said
    assert job.staging.exists()


@pytest.mark.parametrize("place", ["s4weights-7/queue/a.s4w", "state/journal/a.json"])
def test_a_batch_job_keeps_the_file_of_what_has_failed(tmp_path: Path, place: str) -> None:
    job = Job(tmp_path, code=0)
    job.started()
    (tmp_path / place).parent.mkdir()
    (tmp_path / place).write_text('{"id":"a","state":"failed"}\n')
    done, said = job.ended()
    assert done == 75 and "NOT ALL" in said
    assert job.staging.exists()


def record(state: str, tag: str = "durable") -> str:
    """A record of the journal, with a tag that looks like a state."""
    return (
        f'{{"v":1,"id":"4f0c2c1e-0000-4000-8000-000000000001","seq":1,"step":10,"state":"{state}",'
        '"staged_bytes":1,"raw_bytes":0,"stored_bytes":0,"metrics":{"loss":0.5},'
        f'"tags":{{"state":"{tag}"}},"uid":1,"submitted_ms":5,"durable_ms":null,"error":null}}'
    )


def test_records_of_the_journal_are_as_the_batch_script_expects() -> None:
    text = (DEPLOY.parent / "crates/s4-runner/src/record.rs").read_text()
    (states,) = re.findall(r"(?ms)^pub\(crate\) enum State \{(.*?)^\}", text)
    found = [name.lower() for name in re.findall(r"(?m)^    (\w+),$", states)]
    assert found == ["staged", "compressed", "verified", "uploading", "durable", "failed"]
    assert '#[serde(rename_all = "lowercase")]\npub(crate) enum State' in text
    (body,) = re.findall(r"(?ms)^pub\(crate\) struct Record \{(.*?)^\}", text)
    members = re.findall(r"(?m)^    pub (\w+): ", body)
    # Written in this order: no object and no text of a user comes before the state.
    assert members[:5] == ["v", "id", "seq", "step", "state"]
    assert re.findall('"(\\w+)":', record("staged"))[:5] == members[:5]


@pytest.mark.parametrize("state", ["staged", "compressed", "verified", "uploading", "failed"])
@pytest.mark.parametrize("suffix", ["json", "damaged"])
def test_a_batch_job_counts_every_record_that_is_not_durable(
    tmp_path: Path, state: str, suffix: str
) -> None:
    job = Job(tmp_path, code=0)
    job.started()
    (tmp_path / "state/journal").mkdir()
    (tmp_path / "state/journal/a.json").write_text(record("durable"))
    (tmp_path / f"state/journal/b.{suffix}").write_text(record(state))
    done, said = job.ended()
    assert done == 75 and "NOT ALL" in said
    assert job.staging.exists()


def test_a_batch_job_whose_records_are_durable_leaves_no_folder(tmp_path: Path) -> None:
    job = Job(tmp_path, code=0)
    job.started()
    (tmp_path / "state/journal").mkdir()
    for name, tag in (("a", "failed"), ("b", "staged")):
        (tmp_path / f"state/journal/{name}.json").write_text(record("durable", tag))
    done, said = job.ended()
    assert done == 0 and "NOT ALL" not in said
    assert not job.staging.exists()


def test_a_batch_job_on_another_node_says_what_the_first_one_has(tmp_path: Path) -> None:
    state = tmp_path / "state"

    def run(folder: str, node: str, says: str) -> tuple[Job, int, str]:
        place = tmp_path / folder
        place.mkdir(exist_ok=True)
        shutil.rmtree(place / "bin", ignore_errors=True)
        environment = {"STATE_DIR": str(state), "SLURMD_NODENAME": node}
        job = Job(place, says, 0, environment)
        return job, *job.ended()

    first, code, said = run("1", "node-1", "drained open=1 seconds=90")
    assert code == 75 and f"on node-1 in {first.staging}, the journal" in said
    (state / "journal").mkdir()
    (state / "journal/a.json").write_text(record("staged"))
    # A runner without the drive takes the checkpoint for failed, and ends as if nothing were open.
    second, code, said = run("2", "node-2", "drained open=0 seconds=0.2")
    assert code == 75 and "NOT ALL" in said
    assert f"on node-1 in {first.staging}, on node-2 in {second.staging}, the journal" in said
    assert first.staging.exists() and second.staging.exists()
    # Back on the first node, it becomes durable.
    (state / "journal/a.json").write_text(record("durable"))
    _, code, said = run("1", "node-1", "drained open=0 seconds=0.2")
    assert code == 0 and "NOT ALL" not in said
    assert not first.staging.exists() and not (state / "places").exists()


def test_a_batch_job_that_is_ended_does_not_end_a_drain(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.started()
    # Like Slurm, which signals every process.
    for name in ("s4w", "train"):
        os.kill(int((tmp_path / f"log.{name}").read_text()), signal.SIGTERM)
    job.process.send_signal(signal.SIGTERM)
    job.until(lambda lines: "train term" in lines)
    code, _ = job.ended()
    assert code == 9, "the trainer was told"
    assert job.lines().count("s4w term") == 1
    assert not job.staging.exists()


def test_a_batch_job_knows_how_a_trainer_ended_that_ended_while_it_was_told(tmp_path: Path) -> None:
    # The script is slow to go on after it has sent a signal.
    slow = tmp_path / "slow"
    slow.write_text('kill() { local code=0; builtin kill "$@" || code=$?; sleep 0.4; return $code; }\n')
    job = Job(tmp_path, environment={"BASH_ENV": str(slow)})
    job.started()
    time.sleep(0.5)  # Until it waits.
    os.kill(int((tmp_path / "log.s4w").read_text()), signal.SIGTERM)
    job.process.send_signal(signal.SIGTERM)
    job.until(lambda lines: "train term" in lines)
    code, _ = job.ended()
    assert code == 9, "the trainer's own code"


@pytest.mark.parametrize("what", ["link", "mode", "file", "owner"])
def test_a_batch_job_refuses_a_folder_of_somebody_else(tmp_path: Path, what: str) -> None:
    place = tmp_path / "s4weights-7"
    if what == "link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "theirs")
    elif what == "mode":
        place.mkdir()
        place.chmod(0o777)
    elif what == "owner":
        if os.geteuid() != 0:
            pytest.skip("needs root")
        place.mkdir(mode=0o700)
        os.chown(place, 65534, 65534)
    else:
        place.touch()
    job = Job(tmp_path)
    code, said = job.ended()
    assert code == 73 and "STAGING_DIR" in said
    assert not job.log.exists() and place.exists()


def test_a_requeued_batch_job_finds_its_folder_again(tmp_path: Path) -> None:
    place = tmp_path / "s4weights-7"
    place.mkdir(mode=0o700)
    job = Job(tmp_path)
    code, _ = job.ended()
    assert code == 3
    assert any(f"--staging-dir {place}" in line for line in job.lines())
