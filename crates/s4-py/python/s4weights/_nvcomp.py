"""Finds nvCOMP, which NVIDIA's packages install next to this one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path


def load_nvcomp() -> None:
    """Load the library of an installed ``nvidia-libnvcomp-cu12`` or ``-cu13`` package, if there is one.

    The native module then finds it by name. If ``NVCOMP_LIBRARY`` is set, the native module uses
    that first. If it finds nothing, its error says what to install.
    """
    if os.environ.get("NVCOMP_LIBRARY"):
        return
    for folder in _installed():
        for path in sorted(folder.glob("nvidia/libnvcomp/lib*/libnvcomp.so.6")):
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(path))
                return


def _installed() -> list[Path]:
    """Return the folders in which packages are installed. The search path also contains other
    folders, such as the working directory, and no library may be loaded from those.
    """
    folders = [Path(entry) for entry in sys.path]
    return [f for f in folders if f.is_absolute() and f.name in ("site-packages", "dist-packages")]
