"""Finding nvCOMP, which NVIDIA's packages install beside this one."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
from pathlib import Path


def load_nvcomp() -> None:
    """Loads the library of an installed ``nvidia-libnvcomp-cu12`` or ``-cu13``, if there is one.

    The native module then finds it by its name. ``NVCOMP_LIBRARY``, if it is set, comes first there,
    and where nothing is found it says what to install.
    """
    if os.environ.get("NVCOMP_LIBRARY"):
        return
    try:
        spec = importlib.util.find_spec("nvidia.libnvcomp")
    except ModuleNotFoundError:
        return
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("lib*/libnvcomp.so.6")):
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(path))
                return
