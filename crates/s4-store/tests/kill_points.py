"""Kills a store's process at every system call that changes the disk, and lets each of them fail.

Usage: `python kill_points.py STORE_LIFE [--every N]` with the built example `store_life`: every Nth call
of each kind. Needs Linux and strace.
For each call of each kind, in a copy of a folder that has lived once: the process is killed there, or
the call fails with EIO or ENOSPC; then `store_life judge` checks that all that was acknowledged is kept
and nothing is broken. Of the many calls that creating a store makes, every 25th is tried in the same way.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile

CALLS = [
    "openat",
    "write",
    "fsync",
    "linkat,link",
    "rename,renameat,renameat2",
    "unlink,unlinkat,rmdir",
    "mkdir,mkdirat",
]
PARSER = argparse.ArgumentParser()
PARSER.add_argument("life")
PARSER.add_argument("--every", type=int, default=1)
ARGUMENTS = PARSER.parse_args()
LIFE = ARGUMENTS.life
# Seconds after which a life that takes a fraction of one is taken for hung, and killed.
HANG = 3


def live(folder: str, *strace: str) -> tuple[int, str, str]:
    command = ["strace", "-f", "-qq", *strace, LIFE, "live", folder]
    pipe = subprocess.PIPE
    group = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        said, trace = group.communicate(timeout=HANG)
    except subprocess.TimeoutExpired:
        # A failing write may be one that wakes a thread of the process itself: it sleeps for good.
        os.killpg(group.pid, signal.SIGKILL)
        said, trace = group.communicate()
    return group.returncode, said, trace


def numbers(calls: str, start: str | None) -> list[int]:
    """The numbers of the calls in a life. strace counts for each thread; calls by which threads wake
    each other are of no interest, and shift the others a little from life to life."""
    with tempfile.TemporaryDirectory() as folder:
        _, _, trace = live(prepare(folder, start), "-y", "-e", f"trace={calls}")
    names = "|".join(calls.split(","))
    lines = re.findall(rf"^(\[pid +\d+\] )?((?:{names})\(.*)$", trace, re.MULTILINE)
    counts: dict[str, int] = {}
    found = set()
    for thread, line in lines:
        counts[thread] = counts.get(thread, 0) + 1
        if "eventfd" not in line:
            found.add(counts[thread])
    return sorted(found)


def prepare(folder: str, start: str | None) -> str:
    store = os.path.join(folder, "store")
    if start is not None:
        shutil.copytree(start, store)
    return store


def judge(folder: str, promises: str) -> str:
    """What is wrong with the folder; nothing if all is well."""
    command = [LIFE, "judge", folder]
    done = subprocess.run(command, input=promises, capture_output=True, text=True, timeout=120)
    return "" if done.returncode == 0 else done.stderr.strip()[-500:]


def sweep(start: str | None, before: str, step: int) -> int:
    points = unnoticed = hurt = 0
    for calls in CALLS:
        places = numbers(calls, start)[::step]
        for fault in ["signal=KILL", "error=EIO", "error=ENOSPC"]:
            for nth in places:
                with tempfile.TemporaryDirectory() as folder:
                    store = prepare(folder, start)
                    inject = f"inject={calls}:{fault}:when={nth}"
                    code, said, _ = live(store, "-e", f"trace={calls}", "-e", inject)
                    # What was cut off in the middle of a line was not promised.
                    wrong = judge(store, before + said[: said.rfind("\n") + 1])
                points += 1
                unnoticed += code == 0
                if wrong:
                    hurt += 1
                    print(f"{calls} {fault} number {nth}: {wrong}")
        print(f"{calls}: {len(places)} calls, {points} points so far, {hurt} violations", flush=True)
    print(f"{points} kill points, {unnoticed} of them unnoticed by the process, {hurt} violations")
    return hurt


with tempfile.TemporaryDirectory() as once:
    lived = os.path.join(once, "store")
    said = subprocess.run([LIFE, "live", lived], check=True, capture_output=True, text=True).stdout
    violations = sweep(lived, said, ARGUMENTS.every)
violations += sweep(None, "", 25 * ARGUMENTS.every)
sys.exit(bool(violations))
