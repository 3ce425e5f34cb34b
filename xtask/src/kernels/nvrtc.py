"""Compiles kernels/s4.cu to PTX with NVRTC, which is a library: nvrtc.py SOURCES OUTPUT"""

import ctypes
import importlib.util
import sys
from pathlib import Path

OPTIONS = ["--gpu-architecture=compute_75", "--std=c++17", "-default-device"]


def library():
    """Loads NVRTC from PyPI's package, after the second library that it needs from that folder."""
    spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
    folder = Path(next(iter(spec.submodule_search_locations))) / "lib"
    for name in sorted(folder.glob("libnvrtc-builtins.so*")):
        ctypes.CDLL(str(name), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(next(folder.glob("libnvrtc.so*"))))


def text(nvrtc, program, size, get):
    """A text that NVRTC holds for the program, without the zero at its end."""
    length = ctypes.c_size_t()
    getattr(nvrtc, size)(program, ctypes.byref(length))
    buffer = ctypes.create_string_buffer(length.value)
    getattr(nvrtc, get)(program, buffer)
    return buffer.raw.rstrip(b"\0").decode()


def main():
    sources, output = Path(sys.argv[1]), Path(sys.argv[2])
    nvrtc = library()
    program = ctypes.c_void_p()
    source = (sources / "s4.cu").read_bytes()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"s4.cu", 0, None, None) != 0:
        sys.exit("nvrtc: no program")
    options = [o.encode() for o in [*OPTIONS, f"--include-path={sources}"]]
    outcome = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    if outcome != 0:
        sys.exit(text(nvrtc, program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog"))
    output.write_text(text(nvrtc, program, "nvrtcGetPTXSize", "nvrtcGetPTX"))


if __name__ == "__main__":
    main()
