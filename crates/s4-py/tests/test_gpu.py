"""Tensors on a CUDA device. Skipped if there is none, or an error if ``S4_REQUIRE_GPU=1``."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from compare import assert_identical
from s4weights import _device

if os.environ.get("S4_REQUIRE_GPU") != "1" and not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

DTYPES = [
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.uint8, torch.int8, torch.int16),
    *(torch.int32, torch.int64, torch.complex64, torch.complex128),
]


@pytest.fixture(autouse=True)
def no_fallback(recwarn: pytest.WarningsRecorder) -> Any:
    """Nothing goes through the host unnoticed."""
    yield
    assert not [w for w in recwarn if "host memory" in str(w.message)]


def of_dtype(dtype: torch.dtype, n: int = 300_001) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(n)
    if dtype is torch.bool:
        return torch.rand(n, device="cuda", generator=generator) < 0.3
    if dtype.is_complex:
        real = torch.randn(2 * n, device="cuda", generator=generator) * 0.02
        return torch.view_as_complex(real.view(n, 2)).to(dtype)
    return (torch.randn(n, device="cuda", generator=generator) * 20).to(dtype)


def state() -> dict[str, Any]:
    """A mixed state: GPU and host tensors, large and small, alternating."""
    out: dict[str, Any] = {"step": 7}
    for i, dtype in enumerate(DTYPES):
        name = str(dtype)[6:]
        out[name] = {
            "large": of_dtype(dtype),
            "host": of_dtype(dtype, 5000 + i).cpu(),
            "small": of_dtype(dtype, 100 + i),
            "host small": of_dtype(dtype, 10 + i).cpu(),
            "empty": torch.empty(0, 3, dtype=dtype, device="cuda"),
        }
    return out


@pytest.mark.parametrize("preset", ["fast", "balanced", "small"])
@pytest.mark.parametrize("pickled", [False, True])
def test_every_dtype_and_the_same_file(preset: str, pickled: bool, path: Path) -> None:
    obj = {**state(), "extra": range(2) if pickled else None}
    report = s4weights.save(obj, path, preset=preset, device="cuda")
    assert report["tensors"] == 5 * len(DTYPES)
    other = path.with_suffix(".host")
    s4weights.save(obj, other, preset=preset, device="cpu")
    assert path.read_bytes() == other.read_bytes()
    arguments = {"weights_only": not pickled}
    assert_identical(obj, s4weights.load(path, **arguments))
    assert_identical(obj, s4weights.load(path, device="cpu", **arguments))
    assert s4weights.verify(path)["tensors"] == report["tensors"]


def test_the_kernels_do_the_work(path: Path) -> None:
    engine = _device.Compute("cuda", None).engine({0})
    assert engine is not None
    before = engine.chunks()
    obj = {"w": of_dtype(torch.bfloat16, 1 << 22), "m": of_dtype(torch.float32, 1 << 22)}
    s4weights.save(obj, path, preset="fast")
    assert_identical(obj, s4weights.load(path))
    done, host, refused = (a - b for a, b in zip(engine.chunks(), before, strict=True))
    assert done >= 64 and (host, refused) == (0, 0)


def test_views_and_shared_storages(path: Path) -> None:
    base = of_dtype(torch.float32, 1 << 20).view(1024, 1024)
    obj = {
        "base": base,
        "transposed": base.t(),
        "row": base[3],
        "bits": base.view(torch.int32)[::2, 1::3],
        "parameter": torch.nn.Parameter(base[:7]),
        "tied": [(other := of_dtype(torch.bfloat16, 99)), other],
        "behind": of_dtype(torch.float16, 4099)[4098:],
    }
    s4weights.save(obj, path)
    loaded = s4weights.load(path)
    assert_identical(obj, loaded)
    loaded["base"][3, 0] = 42
    assert loaded["transposed"][0, 3] == loaded["row"][0] == 42


def test_work_under_way_on_another_stream_is_waited_for(path: Path) -> None:
    stream = torch.cuda.Stream()
    for _ in range(3):
        with torch.cuda.stream(stream):
            x = torch.zeros(1 << 22, device="cuda")
            torch.cuda._sleep(200_000_000)
            x += torch.arange(1 << 22, device="cuda")
            s4weights.save({"x": x}, path)
            # The next allocation may get the same memory.
            del x
            torch.full((1 << 22,), -1.0, device="cuda")
        assert s4weights.load(path, "cpu")["x"].equal(torch.arange(1 << 22).float())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            garbage = torch.full((1 << 22,), -2.0, device="cuda")
            del garbage
            y = s4weights.load(path)["x"]
        stream.synchronize()
        assert y.cpu().equal(torch.arange(1 << 22).float())


@pytest.mark.parametrize("pickled", [False, True])
def test_map_location(pickled: bool, path: Path) -> None:
    n = torch.cuda.device_count() - 1
    host = torch.arange(70_000.0)
    obj = {"a": host.cuda(), "b": host + 1, "c": host.cuda(n) + 2, "x": range(2) if pickled else 0}
    s4weights.save(obj, path)

    def keep(storage: torch.UntypedStorage, tag: str) -> torch.UntypedStorage | None:
        return storage.cuda() if tag == "cpu" else None

    forms: list[tuple[Any, list[str]]] = [
        (None, ["cuda:0", "cpu", f"cuda:{n}"]),
        ("cuda", ["cuda:0"] * 3),
        (f"cuda:{n}", [f"cuda:{n}"] * 3),
        (torch.device("cuda", n), [f"cuda:{n}"] * 3),
        ("cpu", ["cpu"] * 3),
        ({"cuda:0": "cpu", "cpu": "cuda:0"}, ["cpu", "cuda:0", "cpu" if n == 0 else f"cuda:{n}"]),
        (keep, ["cuda:0", "cuda:0", f"cuda:{n}"]),
        (lambda storage, tag: storage, ["cpu"] * 3),
    ]
    for where, devices in forms:
        loaded = s4weights.load(path, where, weights_only=not pickled)
        for i, (name, device) in enumerate(zip("abc", devices, strict=True)):
            assert str(loaded[name].device) == device, (where, name)
            assert loaded[name].cpu().equal(host + i), (where, name)
    with pytest.raises(RuntimeError):
        s4weights.load(path, f"cuda:{n + 1}", weights_only=not pickled)


def test_load_into(path: Path) -> None:
    obj = state()
    s4weights.save(obj, path)
    target = state()
    for group in target.values():
        if isinstance(group, dict):
            for tensor in group.values():
                tensor.zero_()
    addresses = [t.data_ptr() for g in target.values() if isinstance(g, dict) for t in g.values()]
    s4weights.load_into(target, path)
    assert_identical(obj, target)
    after = [t.data_ptr() for g in target.values() if isinstance(g, dict) for t in g.values()]
    assert addresses == after
    # From host to device, and into a tensor that is not contiguous.
    strided, there = torch.zeros(600_002, device="cuda")[::2], torch.zeros(5002, device="cuda")
    part = {"float32": {"large": strided, "host": there}}
    s4weights.load_into(part, path, strict=False)
    assert strided.equal(obj["float32"]["large"]) and there.cpu().equal(obj["float32"]["host"])


def test_load_into_a_module(path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.Linear(500, 3)).cuda()
    saved = {k: v.clone() for k, v in model.state_dict().items()}
    s4weights.save(model.state_dict(), path)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    version = next(iter(model.parameters()))._version
    s4weights.load_into(model.state_dict(), path)
    assert all(v.equal(saved[k]) for k, v in model.state_dict().items())
    assert next(iter(model.parameters()))._version > version


def test_scratch_limits(path: Path) -> None:
    obj = {"w": of_dtype(torch.bfloat16, 1 << 24), "m": of_dtype(torch.float32, 1 << 23)}
    files = []
    for scratch in (64 << 20, 512 << 20):
        s4weights.save(obj, path, preset="fast", gpu_scratch=scratch)
        files.append(path.read_bytes())
        assert_identical(obj, s4weights.load(path, gpu_scratch=scratch))
        engine = _device.Compute("cuda", scratch).engine({0})
        assert engine is not None and 0 < engine.scratch_high_water(0) <= scratch
    assert files[0] == files[1]
    for call in (s4weights.save, s4weights.load):
        arguments = (obj, path) if call is s4weights.save else (path,)
        with pytest.raises(s4weights.LimitError, match="needed for scratch memory on the device, but"):
            call(*arguments, gpu_scratch=1 << 20)  # type: ignore[operator]
    assert path.read_bytes() == files[0]


def test_nothing_is_left_allocated(path: Path) -> None:
    obj = {"w": of_dtype(torch.bfloat16, 1 << 24)}
    s4weights.save(obj, path)
    s4weights.load_into(obj, path)
    gc.collect()  # What other tests left is not counted.
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
    for _ in range(3):
        s4weights.save(obj, path)
        s4weights.load_into(obj, path)
        s4weights.load(path)  # and dropped at once
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before[1]
    # The memory that the caching allocator keeps of the loaded tensors does not count.
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= before[0]


def test_damage_is_named(path: Path) -> None:
    s4weights.save({"layer": {"w": of_dtype(torch.float32)}}, path)
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    with pytest.raises(s4weights.CorruptDataError, match=r"layer\.w"):
        s4weights.load(path)
    with pytest.raises(s4weights.CorruptDataError, match=r"layer\.w"):
        s4weights.load_into({"layer": {"w": torch.zeros(300_001).cuda()}}, path)


def test_progress_cancels(path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done:
            raise Stop

    obj = {"w": of_dtype(torch.float32, 1 << 25)}
    with pytest.raises(Stop):
        s4weights.save(obj, path, progress=stop)
    assert not list(path.parent.iterdir())
    s4weights.save(obj, path)
    with pytest.raises(Stop):
        s4weights.load(path, progress=stop)
    assert_identical(obj, s4weights.load(path))


ARRAYS = """
import sys
import torch, s4weights
library, path = sys.argv[1:]
if library == "cupy":
    import cupy
    array = cupy.arange(100_000, dtype="float32")
else:
    import jax.numpy
    array = jax.numpy.arange(100_000, dtype="bfloat16")
s4weights.save({"a": array, "again": array, "step": 3}, path)
loaded = s4weights.load(path)
expected = torch.from_dlpack(array)
assert loaded["a"] is loaded["again"] and loaded["a"].device == expected.device
assert loaded["a"].dtype == expected.dtype and loaded["a"].equal(expected)
"""


@pytest.mark.parametrize("library", ["cupy", "jax"])
def test_arrays_of_other_libraries(library: str, path: Path) -> None:
    """In a process of its own: threads of JAX query streams at any time, which breaks captures of CUDA graphs."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-c", ARRAYS, library, str(path)]
    subprocess.run(command, env=environment, timeout=300, check=True)
