"""Finding nvCOMP, which NVIDIA's packages install beside this one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path


def load_nvcomp() -> None:
    """Loads the library of an installed ``nvidia-libnvcomp-cu12`` or ``-cu13``, if there is one.

    The native module then finds it by its name. ``NVCOMP_LIBRARY``, if it is set, comes first
    there, and where nothing is found it says what to install.
    """
    if os.environ.get("NVCOMP_LIBRARY"):
        return
    for folder in _installed():
        for path in sorted(folder.glob("nvidia/libnvcomp/lib*/libnvcomp.so.6")):
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(path))
                return


def _installed() -> list[Path]:
    """Where packages are installed. The search path has other folders as well, such as the working
    directory, from which no library is to be loaded.
    """
    folders = [Path(entry) for entry in sys.path]
    return [f for f in folders if f.is_absolute() and f.name in ("site-packages", "dist-packages")]
