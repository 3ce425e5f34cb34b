"""The command ``s4w``: the native program, and PyTorch's own files and folders, which need PyTorch."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from . import _core
from ._errors import S4Error, UnsupportedFormatError

PICKLES = (".pt", ".pth", ".bin", ".ckpt")

EXIT_DAMAGED, EXIT_IO, EXIT_UNSUPPORTED = 1, 3, 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; gives its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    paths = [a for a in arguments[1:] if not a.startswith("-")]
    command = arguments[0] if arguments else ""
    pickles = any(path.endswith(PICKLES) for path in paths)
    is_folder = bool(paths) and os.path.isdir(paths[0])
    if command == "compress" and (pickles or is_folder):
        return _convert(arguments[1:], paths, _compress)
    if pickles and command == "decompress":
        return _convert(arguments[1:], paths, _decompress)
    if pickles and arguments[:2] == ["store", "restore"]:
        return _restore(arguments[2:])
    # The native program knows no other way to be stopped than the system's.
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_DFL) if is_main else None
    try:
        return _core.command_line(arguments)
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def _restore(arguments: Sequence[str]) -> int:
    """`store restore STORE CHECKPOINT FILE.pt`, which needs PyTorch."""
    words: list[str] = []
    storage: dict[str, str] = {}
    rest = iter(arguments)
    for word in rest:
        if word in ("-o", "--option"):
            key, _, value = next(rest, "").partition("=")
            storage[key] = value
        elif word not in ("-q", "--quiet"):
            words.append(word)
    if len(words) != 3 or "" in storage or any(word.startswith("-") for word in words):
        usage = "s4w store restore [-o KEY=VALUE]... STORE CHECKPOINT FILE.pt"
        print(f"s4w: to a PyTorch file with the default options only: {usage}", file=sys.stderr)
        return 2

    def restore(url: str, which: str, target: str) -> str:
        import torch  # noqa: F401  (if it is missing, that is what is said)

        from . import CheckpointStore

        step = None if which == "latest" else int(which) if which.isdecimal() else which
        with CheckpointStore(url, storage_options=storage) as store:
            # The id of a checkpoint stands for a step.
            state = store.load_checkpoint(step, map_location="cpu")
        return _write(state, target)

    return _convert([], words, restore, most=3)


def _convert(
    arguments: list[str], paths: list[str], convert: Callable[..., str], most: int = 2
) -> int:
    options = {a for a in arguments if a.startswith("-")} - {"-q", "--quiet"}
    trust = {"trusted": True} if "--trusted" in options and convert is _decompress else {}
    if options - {f"--{name}" for name in trust} or len(paths) > most:
        print("s4w: a PyTorch file is converted with the default options only", file=sys.stderr)
        return 2
    try:
        print(convert(*paths, **trust))
    except ImportError as e:
        print(f"s4w: {e}: PyTorch files need PyTorch: pip install torch", file=sys.stderr)
        return EXIT_UNSUPPORTED
    except UnsupportedFormatError as e:
        print(f"s4w: {e}", file=sys.stderr)
        return EXIT_UNSUPPORTED
    except S4Error as e:
        print(f"s4w: {e}", file=sys.stderr)
        return EXIT_IO if isinstance(e, OSError) else EXIT_DAMAGED
    except Exception as e:  # whatever PyTorch's readers raise
        print(f"s4w: {paths[0]}: {e}", file=sys.stderr)
        return EXIT_IO if isinstance(e, OSError) else EXIT_DAMAGED
    return 0


def _compress(source: str, target: str | None = None) -> str:
    import torch

    from . import save
    from ._dcp_folder import load_folder

    if os.path.isdir(source):
        target = target or f"{source.rstrip(os.sep)}.s4w"
        state = load_folder(source)
    else:
        target = target or str(Path(source).with_suffix(".s4w"))
        # The file's own pickle runs restricted: nothing but tensors and plain values.
        state = torch.load(source, map_location="cpu", weights_only=True)
    report = save(state, target)
    ratio = report["bytes_in"] / max(report["bytes_out"], 1)
    return (
        f"{target}: {report['tensors']} tensors, {report['bytes_in']} -> "
        f"{report['bytes_out']} bytes, ratio {ratio:.4f}"
    )


def _decompress(source: str, target: str, trusted: bool = False) -> str:
    from . import load

    return _write(load(source, map_location="cpu", trusted=trusted), target)


def _write(state: object, target: str) -> str:
    import torch

    temporary = Path(f"{target}.tmp")
    try:
        torch.save(state, temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return f"{target}: written"
