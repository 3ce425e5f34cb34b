"""Cuts the power at every moment of a store's life, and drops what was not synced.

Usage: `python power_cuts.py STORE_LIFE [--every N]` with the built example `store_life`: every Nth
state. Needs Linux and strace.
The second life of a folder is traced; all of the first one is on disk. After each system call the
disk may hold any mixture of what was not synced by then; this builds, for each moment, the states with
none of it, all of it, only one piece, and all but one piece, and lets `store_life judge` look at each.
A file's bytes are synced by fsync of the file, a folder's names by fsync of the folder. As a control
the same is done to a store that does not sync, which must fail.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile

PARSER = argparse.ArgumentParser()
PARSER.add_argument("life")
PARSER.add_argument("--every", type=int, default=1)
ARGUMENTS = PARSER.parse_args()
LIFE = ARGUMENTS.life
CALLS = (
    "openat,write,writev,pwrite64,ftruncate,fsync,fdatasync,linkat,link,rename,renameat,renameat2,"
    "unlink,unlinkat,rmdir,mkdir,mkdirat"
)
LINE = re.compile(r"^(?:\[pid +\d+\] )?(\w+)\((.*)\) += (-?\d+)(?:<.*>)?(?: .*)?$")


def trace(folder: str, *flags: str) -> list[tuple[str, str, int]]:
    """The life's calls with their arguments and results, in order."""
    with tempfile.NamedTemporaryFile("r") as log:
        options = ["-f", "-qq", "-y", "-xx", "-s", "1000000", "-o", log.name, "-e", f"trace={CALLS}"]
        command = ["strace", *options]
        subprocess.run([*command, LIFE, "live", folder, *flags], check=True, capture_output=True)
        lines = log.read().splitlines()
    joined: dict[str, str] = {}
    found = []
    for line in lines:
        pid, _, rest = line.partition(" ")
        rest = rest.strip()
        if rest.endswith("<unfinished ...>"):
            joined[pid] = rest.removesuffix("<unfinished ...>").rstrip()
            continue
        resumed = re.match(r"<\.\.\. \w+ resumed>(.*)", rest)
        if resumed:
            rest = joined.pop(pid) + resumed.group(1)
        match = LINE.match(rest)
        if match and int(match.group(3)) >= 0:
            found.append((match.group(1), match.group(2), int(match.group(3))))
    return found


def text(hexed: str) -> str:
    return bytes(int(h, 16) for h in re.findall(r"\\x([0-9a-f]{2})", hexed)).decode()


def data(hexed: str) -> bytes:
    return bytes(int(h, 16) for h in re.findall(r"\\x([0-9a-f]{2})", hexed))


class Disk:
    """Files by inode, folders by path; what is synced, and what is pending in order."""

    def __init__(self, root: str):
        self.root = root
        self.content: dict[int, bytes] = {}
        self.synced: dict[int, bytes] = {}
        self.names: dict[str, int | None] = {}
        self.kept: dict[str, int | None] = {}
        self.next = 1

        for folder, folders, files in os.walk(root):
            for name in folders:
                self.names[os.path.join(folder, name)] = None
            for name in files:
                with open(os.path.join(folder, name), "rb") as file:
                    self.content[self.next] = self.synced[self.next] = file.read()
                self.names[os.path.join(folder, name)] = self.next
                self.next += 1
        self.kept = dict(self.names)

    def pending(self) -> list[tuple]:
        """Pieces that are not on disk for certain: bytes of files, and names."""
        files = [("bytes", i) for i in self.content if self.synced.get(i) != self.content[i]]
        every = set(self.names) | set(self.kept)
        missing = object()
        names = [n for n in sorted(every) if self.names.get(n, missing) != self.kept.get(n, missing)]
        return files + [("name", n) for n in names]

    def state(self, chosen: set[tuple]) -> dict[str, bytes | None]:
        """Path and bytes (`None` for a folder) with the chosen pieces and all that is synced."""
        names = dict(self.kept)
        for kind, name in chosen:
            if kind == "name":
                if name in self.names:
                    names[name] = self.names[name]
                else:
                    names.pop(name, None)
        tree: dict[str, bytes | None] = {}
        for name, inode in sorted(names.items()):
            parent = os.path.dirname(name)
            if parent != self.root and parent not in tree:
                continue
            if inode is None:
                tree[name] = None
            else:
                source = self.content if ("bytes", inode) in chosen else self.synced
                tree[name] = source.get(inode, b"")
        return tree

    def sync_folder(self, folder: str) -> None:
        for name in set(self.names) | set(self.kept):
            if os.path.dirname(name) == folder:
                if name in self.names:
                    self.kept[name] = self.names[name]
                else:
                    self.kept.pop(name, None)


def replay(disk: Disk, promises: str, calls: list[tuple[str, str, int]]):
    """Yields the disk and the promises made, after each call that matters."""
    root, open_files = disk.root, {}

    def path_in(arguments: str, index: int) -> str:
        return text(re.findall(r'"((?:\\x[0-9a-f]{2})*)"', arguments)[index])

    for call, arguments, result in calls:
        if call == "write" and re.match(r"1<", arguments):
            promises += data(re.search(r'"(.*)"', arguments).group(1)).decode()
            yield disk, promises
            continue
        if call == "openat":
            name = path_in(arguments, 0)
            if name.startswith(root + "/") and "O_CREAT" in arguments and name not in disk.names:
                disk.names[name] = disk.next
                disk.content[disk.next] = b""
                disk.next += 1
            open_files[result] = name
        elif call in ("write", "fsync", "fdatasync"):
            number = int(re.match(r"(\d+)<", arguments).group(1))
            name = open_files.get(number, "")
            if call == "write" and name in disk.names and disk.names[name] is not None:
                disk.content[disk.names[name]] += data(re.search(r'"(.*)"', arguments).group(1))
            elif call == "fsync" and (name == root or disk.names.get(name, 0) is None):
                disk.sync_folder(name)
            elif name in disk.names:
                disk.synced[disk.names[name]] = disk.content[disk.names[name]]
            else:
                continue
        elif call in ("linkat", "link", "rename", "renameat", "renameat2"):
            old, new = path_in(arguments, 0), path_in(arguments, 1)
            disk.names[new] = disk.names[old]
            if call.startswith("rename"):
                del disk.names[old]
        elif call in ("unlink", "unlinkat", "rmdir"):
            disk.names.pop(path_in(arguments, 0), None)
        elif call in ("mkdir", "mkdirat"):
            name = path_in(arguments, 0)
            if name.startswith(root + "/"):
                disk.names[name] = None
        elif call in ("writev", "pwrite64", "ftruncate"):
            sys.exit(f"{call} is not modelled")
        yield disk, promises


def states(disk: Disk):
    pending = disk.pending()
    everything = set(pending)
    yield set()
    yield everything
    for piece in pending:
        yield {piece}
        yield everything - {piece}


def judge(tree: dict[str, bytes | None], root: str, promises: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in sorted(tree.items()):
            place = os.path.join(folder, os.path.relpath(name, root))
            if content is None:
                os.mkdir(place)
            else:
                with open(place, "wb") as file:
                    file.write(content)
        command = [LIFE, "judge", folder]
        done = subprocess.run(command, input=promises, capture_output=True, text=True, timeout=120)
    return "" if done.returncode == 0 else done.stderr.strip()[-300:]


def enumerate_states(*flags: str, first: bool = False) -> tuple[int, list[str]]:
    """How many states were judged, and what was wrong; ends at the `first` wrong one."""
    judged = 0
    with tempfile.TemporaryDirectory() as folder:
        root = os.path.join(os.path.realpath(folder), "store")
        command = [LIFE, "live", root]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        start = Disk(root)
        calls = trace(root, *flags)
        seen, wrong = set(), []
        for disk, promises in replay(start, said, calls):
            promises = promises[: promises.rfind("\n") + 1]
            for chosen in states(disk):
                tree = disk.state(chosen)
                key = (promises, tuple(sorted(tree.items(), key=lambda item: item[0])))
                if key in seen:
                    continue
                seen.add(key)
                if len(seen) % ARGUMENTS.every == 0:
                    judged += 1
                    error = judge(tree, root, promises)
                    if error:
                        wrong.append(error)
                    if error and first:
                        return judged, wrong
    return judged, wrong


count, wrong = enumerate_states()
print(f"power cuts: {count} states, {len(wrong)} violations", *wrong[:5], sep="\n  ", flush=True)
control, lost = enumerate_states("no-fsync", first=ARGUMENTS.every > 1)
print(f"not synced: {control} states, {len(lost)} violations (there must be some)", *lost[:2], sep="\n  ")
sys.exit(bool(wrong) or not lost)
