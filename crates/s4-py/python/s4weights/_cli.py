"""The command ``s4w``: runs the native program, and handles PyTorch's own files and folders, which need PyTorch."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import logging
import os
import re
import signal
import sys
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _core
from ._cli_log import OFF, VARIABLE, hold_descriptors, level_of, logged, say, tell
from ._cli_signals import ENDING, SIGNALLED, Signals, Stopped
from ._errors import (
    ConflictError,
    CorruptDataError,
    LimitError,
    NotFoundError,
    S4Error,
    StorageError,
    UnsafeLoadError,
    UnsupportedFormatError,
)
from ._save import PRESETS
from ._sources import Foreign, is_url, open_source, path_of_url, require_s4w

if TYPE_CHECKING:
    from ._entries import CheckpointEntry
    from ._store import CheckpointStore

PICKLES = (".pt", ".pth", ".bin", ".ckpt")
ARRAYS = ".safetensors"

#: The longest time for a request, as in the native program.
_DAY = 24 * 3600

EXIT_DAMAGED, EXIT_USAGE, EXIT_IO, EXIT_UNSUPPORTED, EXIT_CONFLICT = 1, 2, 3, 4, 5
#: Unlike `EXIT_UNSUPPORTED`, it may succeed later: the runner tries again.
EXIT_MEMORY = 6

_NO_MEMORY = "not enough memory on this machine"

#: Options that take a value, and the long names of one-letter options.
_VALUED = frozenset(["--option", "--preset", "--simd", "--threads", "--timeout"])
_SHORT = {"f": "--force", "h": "--help", "o": "--option", "q": "--quiet", "v": "--verbose"}

#: Advice for a distributed checkpoint that holds more than tensors and plain values.
_PIECES = (
    "allow the globals that it needs with torch.serialization.add_safe_globals([...]), and load it from its store "
    "with s4weights.dcp.load"
)

_NO_STREAM = "standard input and output are not supported: name a file (`./-` for a file named `-`)"


class _UsageError(Exception):
    """The command line is invalid."""


class _Line(NamedTuple):
    """A command line: its names, starting with the verb, and its options with their values. A
    missing value is ``None``.
    """

    names: list[str]
    options: list[tuple[str, str | None]]

    def has(self, option: str) -> bool:
        return any(name == option for name, _ in self.options)

    def value(self, option: str) -> str | None:
        return next((value for name, value in reversed(self.options) if name == option), None)

    def threads(self) -> int | None:
        given = self.value("--threads")
        if given is None:
            return None
        if not (given.isdecimal() and given.isascii() and int(given) > 0):
            raise _UsageError("--threads: expected a number of at least 1")
        return int(given)

    def timeout(self) -> float | None:
        given = self.value("--timeout")
        if given is None:
            return None
        try:
            seconds = float(given)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds <= _DAY:
            raise _UsageError("--timeout: expected a number of seconds, at most a day")
        return seconds

    def require(self, names: int, usage: str, *options: str) -> None:
        """Raise `_UsageError` for more names than ``names``, or for unknown or incomplete options."""
        known = {"--quiet", "--verbose", "--force", "--timeout", *options}
        # Only names are reported: the value of an option may be a secret.
        unknown = sorted({name for name, _ in self.options} - known)
        if unknown or len(self.names) > names:
            what = f"{unknown[0]} is not supported" if unknown else f"at most {names - 1} names are allowed"
            raise _UsageError(f"{what} for PyTorch files: {usage}")
        if missing := [name for name, value in self.options if value is None]:
            raise _UsageError(f"{missing[0]} requires a value: {usage}")

    def require_no_timeout(self, *files: str) -> None:
        """Raise `_UsageError` for a ``--timeout`` that would have no effect."""
        if self.timeout() is not None and any(map(_is_remote, files)):
            what = "--timeout: not supported for PyTorch files at URLs"
            raise _UsageError(what)


def _split(arguments: Sequence[str]) -> _Line:
    names: list[str] = []
    options: list[tuple[str, str | None]] = []
    rest = iter(arguments)
    for word in rest:
        if word == "--":
            names += rest
        elif word.startswith("--"):
            name, equals, value = word.partition("=")
            options.append((name, next(rest, None) if name in _VALUED and not equals else value))
        elif word.startswith("-") and len(word) > 1:
            for at, letter in enumerate(word[1:], 2):
                name = _SHORT.get(letter, f"-{letter}")
                if name in _VALUED:
                    options.append((name, word[at:].removeprefix("=") or next(rest, None)))
                    break
                options.append((name, ""))
        else:
            names.append(word)
    return _Line(names, options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    hold_descriptors()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if unreadable := _no_text(arguments):
        tell(unreadable)
        return EXIT_USAGE
    line = _split(arguments)
    verbose = sum(name == "--verbose" for name, _ in line.options)
    level = level_of(verbose, line.has("--quiet"))
    with logged(logging.WARNING if level is None else level):
        code = None if line.has("--help") else _run(line, level is not None)
        return _native(arguments) if code is None else code


def _native(arguments: list[str]) -> int:
    """Run the native program; return its exit code."""
    # It has its own signal handlers while it runs: Python's would wait until it is done.
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in ENDING} if is_main else {}
    if before.get(signal.SIGINT) not in (None, signal.SIG_IGN):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return _core.command_line(arguments, is_main)
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def _no_text(arguments: Sequence[str]) -> str:
    """Return the native program's message about arguments that are not text, or an empty string if all are."""
    bad = []
    for number, argument in enumerate(arguments, 1):
        shown = os.fsencode(argument).decode("utf-8", "replace")
        if shown != argument:
            # Possible secrets are left out: values of options, queries of URLs.
            bad.append(f"argument {number} (`{re.split('[=?#]', shown)[0]}`)")
    return f"{', '.join(bad)} is not text: UTF-8 is expected" if bad else ""


def _converter(line: _Line) -> Callable[[_Line], str] | None:
    """The function that does the work, if that needs PyTorch; otherwise ``None``."""
    names = line.names
    if names[:1] == ["compress"] and len(names) > 1:
        return _compress if names[1].endswith(PICKLES) or os.path.isdir(names[1]) else None
    if names[:1] == ["decompress"] and len(names) > 1:
        if len(names) > 2 and names[2].endswith(ARRAYS):
            return _decompress_arrays if _is_pickled(line, names[1]) else None
        is_pickle = names[2].endswith(PICKLES) if len(names) > 2 else _is_object(names[1])
        return _decompress if is_pickle else None
    if names[:2] == ["store", "restore"]:
        if any(name.endswith(PICKLES) for name in names[4:]):
            return _restore
        if any(name.endswith(ARRAYS) for name in names[4:]) and _is_pickled_there(line):
            return _restore_arrays
    return None


def _is_pickled(line: _Line, source: str) -> bool:
    """Whether a file contains a pickle, and PyTorch is installed to find its tensors."""
    # Only the native program obeys the option.
    is_timed = line.has("--timeout") and _is_remote(source)
    if is_timed or _is_stream(source) or importlib.util.find_spec("torch") is None:
        return False
    try:
        reader = open_source(source, None, None)
        return not isinstance(reader, Foreign) and reader.form() == "pickle"
    except (S4Error, OSError, ValueError):
        # The native program will report the error.
        return False


def _is_pickled_there(line: _Line) -> bool:
    """The same for a checkpoint of a store."""
    if importlib.util.find_spec("torch") is None:
        return False
    # The call that opens the store next gives its warnings.
    with warnings.catch_warnings(), logged(OFF):
        warnings.simplefilter("ignore")
        try:
            with _chosen(line, *_choice(line, "")) as (_, _, reader):
                return reader.form() == "pickle"
        except (S4Error, OSError, ValueError, _UsageError):
            return False


def _is_object(source: str) -> bool:
    """Whether a file holds more than tensors, and PyTorch is installed to write all of it."""
    if is_url(source) or _is_stream(source) or importlib.util.find_spec("torch") is None:
        return False
    try:
        reader = open_source(source, None, None)
        if isinstance(reader, Foreign):
            return False
        return reader.form() != "tensors" or _is_distributed(reader)
    except (S4Error, OSError, ValueError):
        # The native program will report the error.
        return False


def _is_distributed(reader: _core.Reader) -> bool:
    """Whether a checkpoint holds the pieces of a distributed one."""
    try:
        reader.blob("dcp")
    except KeyError:
        return False
    return True


def _run(line: _Line, is_level: bool) -> int | None:
    """Do the work. Return the exit code, or ``None`` if the native program should do it."""
    with Signals() as signals, warnings.catch_warnings():
        if line.has("--quiet"):
            warnings.simplefilter("ignore")
        warnings.showwarning = _warn
        try:
            convert = _converter(line)
            if convert is None:
                return None
            if not is_level:
                raise _UsageError(f"{VARIABLE}: expected `off`, `error`, `warn`, `info`, `debug` or `trace`")
            if "-" in line.names:
                raise _UsageError(_NO_STREAM)
            say(convert(line))
            return 0
        except _UsageError as e:
            code, said = EXIT_USAGE, str(e)
        except ImportError as e:
            code, said = EXIT_UNSUPPORTED, f"{e}: PyTorch files need PyTorch: pip install torch"
        except MemoryError:
            code, said = EXIT_MEMORY, _NO_MEMORY
        except (Exception, Stopped) as e:
            code, said = _code(e), _message(e)
            if code == EXIT_MEMORY:
                said = f"{_NO_MEMORY}: {said}"
        if signals.came:
            # PyTorch's writers raise something else if a signal stops them.
            code, said = SIGNALLED + signals.came, "interrupted"
    tell(said)
    return code


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    tell(f"warning: {message}")


def _code(error: BaseException) -> int:
    if _is_no_memory(error):
        return EXIT_MEMORY
    if isinstance(error, (LimitError, UnsafeLoadError, UnsupportedFormatError)):
        return EXIT_UNSUPPORTED
    if isinstance(error, ConflictError):
        return EXIT_CONFLICT
    if isinstance(error, OSError):
        return EXIT_IO
    # An argument that a function of this package refuses, such as a URL of an unknown kind.
    is_refused = isinstance(error, (TypeError, ValueError)) and not isinstance(error, S4Error)
    return EXIT_USAGE if is_refused else EXIT_DAMAGED


def _is_no_memory(error: BaseException) -> bool:
    """Whether an error says that there was no memory. PyTorch has no type of its own for that; of our own errors it is
    the cause.
    """
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, LimitError):
        error = error.__cause__ or error
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _message(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or repr(error)


def _compress(line: _Line) -> str:
    usage = "s4w compress [--preset NAME] [--threads N] [--force] IN [OUT]"
    line.require(3, usage, "--preset", "--threads")
    preset, threads = line.value("--preset"), line.threads()
    preset = "balanced" if preset is None else preset
    if preset not in PRESETS:
        raise _UsageError(f"--preset: expected one of {', '.join(PRESETS[:-1])}")
    source = line.names[1]
    is_folder = os.path.isdir(source)
    if len(line.names) > 2:
        target = line.names[2]
    elif is_folder:
        # `.` and `..` must be resolved to get the folder's name.
        plain = source.rstrip(os.sep) or source
        is_dots = os.path.basename(plain) in ("", ".", "..")
        target = f"{os.path.realpath(source) if is_dots else plain}.s4w"
    else:
        target = _with_ending(source, ".s4w")
    line.require_no_timeout(target)
    _check_output(source, target, line)
    from . import save
    from ._cli_torch import read_file, replacing
    from ._dcp_folder import load_folder

    try:
        state = load_folder(source) if is_folder else read_file(source)
    except UnsafeLoadError as error:
        if is_folder:
            steps = (
                f"torch.distributed.checkpoint.format_utils.dcp_to_torch_save({source!r}, 'all.pt'), then "
                f"s4weights.save(torch.load('all.pt', weights_only=False), {target!r})"
            )
        else:
            steps = f"s4weights.save(torch.load({source!r}, weights_only=False), {target!r})"
        raise _unsafe(source, error, steps) from error
    path = None if line.has("--force") else _local(target)
    if path is None:
        report = save(state, target, preset=preset, threads=threads)
    else:
        # `save` replaces a file that appeared since `_check_output`.
        with replacing(path, force=False) as file:
            report = save(state, file, preset=preset, threads=threads)
    ratio = report["bytes_in"] / max(report["bytes_out"], 1)
    return (
        f"{target}: {report['tensors']} tensors, {report['bytes_in']} -> "
        f"{report['bytes_out']} bytes, ratio {ratio:.4f}"
    )


def _decompress(line: _Line) -> str:
    usage = "s4w decompress [--trusted] [--threads N] [--force] IN [OUT.pt]"
    line.require(3, usage, "--trusted", "--threads")
    threads = line.threads()
    source = line.names[1]
    target = line.names[2] if len(line.names) > 2 else _with_ending(source, ".pt")
    line.require_no_timeout(source)
    _check_output(source, target, line)
    trusted = line.has("--trusted")
    # Fails early if the file cannot be written.
    _require_folder(target)
    from ._cli_torch import write_file
    from ._load import load

    reader = open_source(source, None, threads, trusted)
    if isinstance(reader, Foreign):
        what = "a safetensors file" if reader.is_safetensors else "a file of another format"
        raise UnsupportedFormatError(f"{source}: {what}, not a .s4w file")
    try:
        if _is_distributed(reader):
            state = _put_together(reader, source)
        else:
            state = load(
                source, map_location="cpu", weights_only=True, threads=threads, trusted=trusted
            )
    except UnsafeLoadError as error:
        steps = f"torch.save(s4weights.load({source!r}, weights_only=False), {target!r})"
        raise _unsafe(source, error, _PIECES if _is_distributed(reader) else steps) from error
    write_file(state, target, force=line.has("--force"))
    return f"{target}: written"


def _restore(line: _Line) -> str:
    """`store restore STORE CHECKPOINT FILE.pt`."""
    choice, target = _restored(line, "FILE.pt")
    from ._cli_torch import write_file

    with _chosen(line, *choice) as (store, entry, reader):
        is_distributed = _is_distributed(reader)
        where = f"{store.url}: step {entry.step}"
        if int(entry.tags.get("dcp.ranks", "1")) > 1:
            what = (
                f"{where}: each rank saved its own checkpoint, and this one is from rank "
                f"{entry.tags.get('dcp.rank')}: load it with s4weights.dcp on the same number of ranks"
            )
            raise UnsupportedFormatError(what)
        try:
            if is_distributed:
                state = _put_together(reader, where)
            else:
                # The id of a checkpoint can take the place of a step.
                state = store.load_checkpoint(entry.id, map_location="cpu", weights_only=True)
        except UnsafeLoadError as error:
            steps = f"s4weights.load_checkpoint({store.url!r}, {entry.id!r}, weights_only=False)"
            raise _unsafe(where, error, _PIECES if is_distributed else steps) from error
    write_file(state, target, force=line.has("--force"))
    return f"{target}: written"


def _restore_arrays(line: _Line) -> str:
    """`store restore STORE CHECKPOINT FILE.safetensors` of a pickled object."""
    choice, target = _restored(line, "FILE.safetensors")
    with _chosen(line, *choice) as (store, entry, reader):
        return _write_arrays(reader, f"{store.url}: step {entry.step}", target, line)


def _decompress_arrays(line: _Line) -> str:
    """`decompress FILE.s4w FILE.safetensors` of a pickled object."""
    usage = "s4w decompress [--trusted] [--threads N] [--force] IN OUT.safetensors"
    line.require(3, usage, "--trusted", "--threads")
    source, target = line.names[1:]
    threads = line.threads()
    line.require_no_timeout(source)
    _check_output(source, target, line)
    _require_folder(target)
    reader = require_s4w(open_source(source, None, threads, line.has("--trusted")))
    return _write_arrays(reader, source, target, line)


def _write_arrays(reader: _core.Reader, where: str, target: str, line: _Line) -> str:
    from ._cli_arrays import write_arrays

    try:
        force = line.has("--force")
        number, left_out = write_arrays(reader, where, target, force=force)
    except UnsafeLoadError as error:
        raise _unsafe(where, error, "s4weights.load(..., weights_only=False)") from error
    warnings.warn(
        f"{target} contains only tensors; left out: {left_out}. Use a name that ends with .pt to write everything",
        stacklevel=1,
    )
    return f"{target}: {number} tensor{'' if number == 1 else 's'}"


def _restored(line: _Line, file: str) -> tuple[tuple[dict[str, str], int | str | None], str]:
    """The choice of `store restore`, as from `_choice`, and the file that it writes."""
    usage = f"s4w store restore [-o KEY=VALUE]... [--timeout SECONDS] [--force] STORE CHECKPOINT {file}"
    line.require(5, usage, "--option")
    choice, target = _choice(line, usage), line.names[4]
    root, path = _local(line.names[2]), _local(target)
    if root is not None and path is not None:
        root = os.path.realpath(root)
        if os.path.isdir(root) and Path(os.path.realpath(path)).is_relative_to(root):
            what = "the output is in the store that is read; nothing was changed. Name an output outside of it"
            raise _UsageError(f"{target}: {what}")
    _check_output(None, target, line)
    _require_folder(target)
    return choice, target


def _choice(line: _Line, usage: str) -> tuple[dict[str, str], int | str | None]:
    """The options of the object store, and the step or id, of `store restore`."""
    pairs = [(value or "").partition("=") for name, value in line.options if name == "--option"]
    storage = {key: value for key, _, value in pairs}
    if "" in storage or len(storage) < len(pairs):
        raise _UsageError(f"an object store option has no name or is given twice: {usage}")
    which = line.names[3]
    step = None if which == "latest" else int(which) if which.isdecimal() else which
    if isinstance(step, str):
        try:
            uuid.UUID(step)
        except ValueError:
            what = f"`{which}` is not a step, a checkpoint id or `latest`"
            raise _UsageError(what) from None
    return storage, step


@contextlib.contextmanager
def _chosen(
    line: _Line, storage: dict[str, str], step: int | str | None
) -> Iterator[tuple[CheckpointStore, CheckpointEntry, _core.Reader]]:
    """The store, the entry and a reader of the checkpoint that `store restore` names."""
    from . import CheckpointStore

    # Read-only, a store with a damaged log can be opened, too, with a warning.
    with CheckpointStore(
        line.names[2], storage_options=storage, read_only=True, timeout=line.timeout()
    ) as store:
        native = store._open("open")
        entry = store._find(step)
        yield store, entry, native.open(entry.id)


def _put_together(reader: _core.Reader, where: str) -> Any:
    # Imported late: not every build of PyTorch has what it needs.
    from ._cli_dcp import put_together

    return put_together(reader, where)


def _unsafe(where: str, error: UnsafeLoadError, steps: str) -> UnsafeLoadError:
    """Return an error that describes what to do in Python."""
    from ._cli_torch import brief

    place = f"`{error.key_path}`" if error.key_path else "the saved object"
    if error.global_name:
        what = f"{place} needs `{error.global_name[:200]}`, which is neither a tensor nor a plain value"
    else:
        what = f"PyTorch's restricted unpickler rejected {place}: {brief(error)}"
    message = (
        f"{where}: {what}. Loading it can run code from the file, which `s4w` never does. If you "
        f"trust its source, do this in Python: {steps}"
    )
    return UnsafeLoadError(message, key_path=error.key_path, global_name=error.global_name)


def _with_ending(name: str, ending: str) -> str:
    """A path or URL with another ending, as the native program has it: `step.1000` keeps its number."""
    known = next((known for known in (ARRAYS, ".s4w", *PICKLES) if name.endswith(known)), "")
    return name.removesuffix(known) + ending


def _check_output(source: str | None, target: str, line: _Line) -> None:
    """Refuse to read a pipe, to overwrite the input or, without ``--force``, to overwrite anything, as the native
    program does.
    """
    if source is not None and _is_stream(source):
        what = "the input cannot be a pipe or a device, because it is read by range: name a file"
        raise _UsageError(f"{source}: {what}")
    source_path = None if source is None else _local(source)
    target_path = _local(target)
    if source is not None and (source == target or _is_same(source_path, target_path)):
        what = "input and output are the same file; nothing was changed. Name another output"
        raise _UsageError(f"{target}: {what}")
    if line.has("--force"):
        return
    there = os.path.isfile(target_path) if target_path is not None else _is_object_there(target)
    if there:
        raise ConflictError(f"{target} exists already; --force replaces it")


def _is_stream(name: str) -> bool:
    """Whether a file is a pipe or a device: reading it consumes its contents, and may block forever."""
    path = _local(name)
    if path is None:
        return False
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _is_same(a: str | None, b: str | None) -> bool:
    if a is None or b is None:
        return False
    with contextlib.suppress(OSError):
        return os.path.samefile(a, b)
    return False


def _is_object_there(url: str) -> bool:
    try:
        open_source(url, None, None)
    except NotFoundError:
        return False
    except (CorruptDataError, LimitError, UnsupportedFormatError):
        return True
    except StorageError as error:
        # Without permission to read, this cannot be found out.
        if error.errno != errno.EACCES:
            raise
        return False
    return True


def _local(name: str) -> str | None:
    """The path that a name or a ``file:`` URL means, as the native program reads it."""
    return path_of_url(name) if is_url(name) else name


def _is_remote(name: str) -> bool:
    return is_url(name) and _local(name) is None


def _require_folder(target: str) -> None:
    """Raise before any work is done if it is already clear that the file cannot be written."""
    if is_url(target):
        kind = "a .safetensors file" if target.endswith(ARRAYS) else "a PyTorch file"
        what = f"{target}: {kind} can only be written to a local path, not to a URL"
        raise UnsupportedFormatError(what)
    if os.path.isdir(target):
        raise StorageError(errno.EISDIR, os.strerror(errno.EISDIR), target)
    folder = os.path.dirname(target) or "."
    if not os.path.isdir(folder):
        missing = errno.ENOTDIR if os.path.exists(folder) else errno.ENOENT
        raise StorageError(
            missing, f"cannot use the folder {folder}: {os.strerror(missing)}", target
        )
