"""Log output of the command ``s4w``, on standard error.

In a Python process, the native crates log to ``logging`` from the first import on, so the flags and the variable
that the native program obeys are obeyed here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import unicodedata
from collections.abc import Iterator

from ._errors import StorageError

#: The environment variable that sets the level.
VARIABLE = "S4_LOG"

#: Above every level.
OFF = logging.CRITICAL + 1

_LEVELS = {
    "off": OFF,
    "error": logging.ERROR,
    "warn": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
    "trace": logging.DEBUG,
}
_NAMES = {logging.ERROR: "ERROR", logging.WARNING: "WARN", logging.INFO: "INFO", logging.DEBUG: "DEBUG"}

#: The categories of characters that are escaped, and how the native program escapes some of them.
_HIDDEN = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def level_of(verbose: int, quiet: bool) -> int | None:
    """The level for ``verbose`` times ``-v``, with or without ``-q``, or ``None`` if the variable has no valid one."""
    if verbose:
        return logging.INFO if verbose == 1 else logging.DEBUG
    if quiet:
        return logging.ERROR
    return _LEVELS.get(os.environ.get(VARIABLE, "").lower() or "warn")


class _ToStderr(logging.Handler):
    """Prints records as the native program does."""

    def emit(self, record: logging.LogRecord) -> None:
        name = _NAMES.get(record.levelno, record.levelname)
        where = f"{record.name}: " if self.level <= logging.DEBUG else ""
        _to_stderr(f"{name:>5} {where}{visible(record.getMessage())}\n")


def _to_stderr(line: str) -> None:
    """Write to standard error, if there is one."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            # Right away, since the native program writes there, too, and in one write: ``print`` writes the line's end
            # separately, and other threads may be logging.
            sys.stderr.write(line)


def tell(text: str) -> None:
    """Print a message on a line of standard error."""
    _to_stderr(f"s4w: {visible(text)}\n")


def say(text: str) -> None:
    """Print the result on a line of standard output; a reader that has closed it has read enough."""
    stream = sys.stdout
    if stream is None:
        return
    # The locale may lack characters of a name.
    encoding = stream.encoding or "utf-8"
    line = f"{visible(text)}\n".encode(encoding, "backslashreplace").decode(encoding)
    try:
        stream.write(line)
        stream.flush()
    except OSError as error:
        # Output that is still buffered would fail again when the process ends, and change its exit code.
        with contextlib.suppress(OSError), open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), stream.fileno())
        if not isinstance(error, BrokenPipeError):
            raise StorageError(error.errno, error.strerror, "standard output") from error


def hold_descriptors() -> None:
    """Open the descriptors of standard streams that are closed: a file that gets one would be written over."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest that is free.
            os.open(os.devnull, os.O_RDWR)


@contextlib.contextmanager
def logged(level: int) -> Iterator[None]:
    """Context manager that writes log messages of ``level`` and above to standard error."""
    logger, handler = logging.getLogger("s4weights"), _ToStderr(level)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


def visible(text: str) -> str:
    """Escape control characters in a message of one line: names come from files that others wrote."""
    return "".join(_escaped(c) if unicodedata.category(c) in _HIDDEN else c for c in text)


def _escaped(c: str) -> str:
    return _SHORT.get(c) or f"\\u{{{ord(c):x}}}"
