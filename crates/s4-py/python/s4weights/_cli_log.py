"""What the command ``s4w`` logs, to standard error.

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


def level_of(verbose: int, quiet: bool) -> int | None:
    """The level for ``verbose`` times ``-v``, with or without ``-q``; ``None`` if the variable has no valid one."""
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
        with contextlib.suppress(OSError):
            # At once: the native program writes there, too.
            sys.stderr.write(f"{name:>5} {where}{visible(record.getMessage())}\n")


def tell(text: str) -> None:
    """Tells the user something, on a line of standard error."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            # In one piece: ``print`` writes the line's end by itself, and other threads may be logging.
            sys.stderr.write(f"s4w: {visible(text)}\n")


@contextlib.contextmanager
def logged(level: int) -> Iterator[None]:
    """Within it, what is logged from ``level`` on goes to standard error."""
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
    """Escapes control characters in a message: names come from files that others wrote."""
    hidden = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return "".join(
        f"\\u{{{ord(c):x}}}" if c != "\n" and unicodedata.category(c) in hidden else c for c in text
    )
