"""The part of the demo that trains with a runner.

A training process hands its checkpoints to a runner, `s4w serve`, over a socket. Both are killed
by SIGKILL, one after the other; then both start again and go on. In the end everything on the
local drive is deleted, and everything that the runner ever accepted must come from the bucket, bit
for bit.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path

import torch
from same import check, differences

import s4weights

#: What the training script prints once the runner has a checkpoint.
ACCEPTED = re.compile(r"step (\d+): .*accepted by the runner")


class Runner:
    """A runner that is started, killed and ended."""

    def __init__(self, program: str, folder: Path, url: str, options: dict[str, str]) -> None:
        self.folder = folder
        self.socket = f"unix://{folder.resolve()}/s4w.sock"
        config = folder / "runner.toml"
        lines = ["min_free_bytes = 0", "threads = 1", "[storage_options]"]
        # JSON strings are valid TOML strings.
        lines += [f"{key} = {json.dumps(value)}" for key, value in options.items()]
        config.write_text("\n".join(lines) + "\n")
        self.command = [program, "serve", "--config", str(config), "--store", url]
        self.command += ["--state-dir", str(folder / "state"), "--http", "127.0.0.1:0"]
        self.command += ["--socket", str(folder / "s4w.sock")]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(self.command, stderr=log)

    def kill(self, when: str) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        print(f"  the runner: SIGKILL, {when}")

    def end(self) -> bool:
        """Ends it as a service manager does; it exits once everything is durable."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120) == 0


def with_runner(
    command: list[str],
    program: str,
    folder: Path,
    url: str,
    options: dict[str, str],
    kill_in: int,
    unbroken: object,
) -> bool:
    """Runs this part of the demo; returns whether all was as it must be."""
    own = folder / "runner"
    own.mkdir()
    runner = Runner(program, own, url, options)
    accepted: list[int] = []

    def train(*more: str) -> int:
        words = [*command, "--store", url, "--runner", runner.socket, *more]
        for key, value in options.items():
            words += ["--storage-option", f"{key}={value}"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or []:
                print(line, end="", flush=True)
                if found := ACCEPTED.search(line):
                    accepted.append(int(found[1]))
        return process.returncode

    runner.start()
    if train("--kill-in-step", str(kill_in)) != -signal.SIGKILL:
        print("  it was not killed")
        return False
    runner.kill(f"with step {accepted[-1]} accepted")
    runner.start()
    final = folder / "runner.pt"
    if train("--final", str(final)) != 0:
        return False
    runner.kill(f"right after it accepted step {accepted[-1]}")
    runner.start()
    client = s4weights.CheckpointStore(url, runner=runner.socket, storage_options=options).runner
    assert client is not None
    client.flush(timeout=120)
    if not runner.end():
        print("  the runner did not end as it should")
        return False
    shutil.rmtree(own)
    print("  the local drive: deleted. What follows comes from the bucket alone")
    same = [check("the last state, every byte", torch.load(final), unbroken)]
    with s4weights.CheckpointStore(url, storage_options=options) as store:
        listed = [entry.step for entry in store.list()]
        if sorted(listed) != sorted(set(accepted)):
            print(f"  DIFFERENT: accepted were {accepted}, listed are {listed}")
            return False
        for step in listed:
            file = s4weights.load(folder / "unbroken" / f"step-{step:06}.s4w")
            if found := differences(store.load_checkpoint(step), file):
                print(f"  DIFFERENT: step {step}, in {found[0]}")
                return False
        print(f"  same: all {len(listed)} accepted steps, each listed once")
    return all(same)
