"""The part of the demo that trains with a checkpoint store.

A run dies by SIGKILL while a checkpoint is uploaded, and is resumed from the newest one that was
published. Then a delta becomes a base, older checkpoints are retired and swept, and every
checkpoint that is still listed must be what the unbroken run had at that step.
"""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import torch
from same import check, differences

import s4weights

#: The most checkpoints that share a base: few, so that the demo shows more than one base.
MAX_CHAIN = 5
#: How many of the newest checkpoints are kept, with what they need.
KEPT = 3
SAVED = re.compile(r"step (\d+): .* in ([0-9.]+) s$")


class Demo:
    """One run with a store, beside the files of an unbroken run.

    `command` is the training script with what every run has in common; `unbroken` the folder of
    the unbroken run's files; `kill_in` the step whose save is killed, `before` the step saved
    before it.
    """

    def __init__(self, command: list[str], unbroken: Path, kill_in: int, before: int) -> None:
        self.command, self.unbroken = command, unbroken
        self.kill_in, self.before = kill_in, before
        self.times: dict[int, str] = {}

    def run(self, url: str, options: dict[str, str], final: Path, reference: object) -> bool:
        """Runs everything with the store at `url`; returns whether all was as it must be."""
        self.times = {}
        if self.train(url, options, kill_in_save=self.kill_in) != -signal.SIGKILL:
            print("  it was not killed")
            return False
        with self.open(url, options) as store:
            if store.latest() != self.before:
                print(f"  step {self.before} should be the newest, but {store.latest()} is")
                return False
            left = store.gc(dry_run=True, grace=0, exclusive=True)["given_up"]
            size = sum(item["bytes"] for item in left)
            print(f"  newest published: step {self.before}; of the next, {size:,} bytes were left")
        if self.train(url, options, final=final) != 0:
            return False
        same = [check("the last state, every byte", torch.load(final), reference)]
        with self.open(url, options) as store:
            self.table(store)
            same.append(self.all_same(store))
            self.clean_up(store)
            same.append(self.all_same(store))
            clean = store.verify()["clean"]
            print(f"  verify, every hash and value: {'clean' if clean else 'NOT CLEAN'}")
            return clean and all(same)

    def open(self, url: str, options: dict[str, str]) -> s4weights.CheckpointStore:
        return s4weights.CheckpointStore(url, storage_options=options, max_chain=MAX_CHAIN)

    def train(
        self, url: str, options: dict[str, str], *, kill_in_save: int = 0, final: Path | None = None
    ) -> int:
        """Runs the training script; returns its exit code, and remembers how long saves took."""
        command = [*self.command, "--store", url, "--max-chain", str(MAX_CHAIN)]
        command += ["--kill-in-save", str(kill_in_save)]
        for key, value in options.items():
            command += ["--storage-option", f"{key}={value}"]
        command += ["--final", str(final)] if final else []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or []:
                print(line, end="", flush=True)
                if found := SAVED.search(line):
                    self.times[int(found[1])] = found[2]
        return process.returncode

    def table(self, store: s4weights.CheckpointStore) -> None:
        """Prints the listed checkpoints."""
        print(f"  {'step':>6}  {'kind':<6}{'bytes':>12}{'ratio':>8}{'save':>10}")
        for entry in store.list():
            took = f"{float(self.times[entry.step]) * 1e3:.0f} ms"
            ratio = entry.raw_bytes / entry.bytes
            print(f"  {entry.step:>6}  {entry.kind:<6}{entry.bytes:>12,}{ratio:>8.3f}{took:>10}")

    def all_same(self, store: s4weights.CheckpointStore) -> bool:
        """Whether each listed step is what the unbroken run saved in a file."""
        steps = [entry.step for entry in store.list()]
        for step in steps:
            file = s4weights.load(self.unbroken / f"step-{step:06}.s4w")
            if found := differences(store.load_checkpoint(step), file):
                print(f"  DIFFERENT: step {step}, in {found[0]} and {len(found) - 1} other places")
                return False
        print(f"  same: all {len(steps)} listed steps as the unbroken run had them")
        return True

    def clean_up(self, store: s4weights.CheckpointStore) -> None:
        """Makes a delta a base, pins the oldest checkpoint, applies retention, and sweeps."""
        entries = store.list()
        newer = entries[len(entries) // 2 :]
        delta = next(entry for entry in newer if entry.kind == "delta")
        base = store.rebase(delta.step)
        sizes = f"{delta.bytes:,} -> {base.bytes:,} bytes"
        print(f"  rebased: step {base.step}, {sizes}, now a {base.kind}")
        pinned = entries[0].step
        store.pin(pinned)
        steps = {entry.id: entry.step for entry in store.list()}
        gone = store.apply_retention(s4weights.Retention(keep_last=KEPT))
        print(f"  pinned: step {pinned}; retired: {', '.join(str(steps[id]) for id in sorted(gone))}")
        # The first sweep gives up the attempt of the killed run, the second one deletes its data.
        swept = [store.gc(grace=0, exclusive=True)["deleted_bytes"] for _ in range(2)]
        print(f"  swept: {sum(swept):,} bytes of what was retired, replaced or never published")

