"""Tensors: every dtype and bit pattern, views and strides, layouts, devices that hold no data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import s4weights
from compare import assert_identical, through_s4, through_torch

DTYPES = sorted(
    {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str
)
#: Dtypes that `torch.save` has no way to write.
UNKNOWN_TO_TORCH = {
    getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 8)
}


def raw(nbytes: int, seed: int = 0) -> torch.UntypedStorage:
    """A storage of random bytes."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return data.untyped_storage()


def of_bytes(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(storage)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("pickled", [False, True])
def test_every_dtype_with_every_byte(dtype: torch.dtype, pickled: bool, path: Path) -> None:
    if pickled and dtype in UNKNOWN_TO_TORCH:
        pytest.skip("PyTorch cannot pickle it")
    obj: dict[str, Any] = {"extra": range(2) if pickled else None}
    if dtype.is_complex or dtype.is_floating_point or not str(dtype).startswith("torch.q"):
        obj["random"] = of_bytes(raw(dtype.itemsize * 4099), dtype)
        obj["shaped"] = of_bytes(raw(dtype.itemsize * 24, 1), dtype).as_strided((2, 3), (1, 4), 2)
        obj["empty"] = torch.empty((2, 0), dtype=dtype)
        obj["scalar"] = of_bytes(raw(dtype.itemsize, 2), dtype).as_strided((), ())
    else:
        obj["quantized"] = quantized(dtype)
    loaded = through_s4(obj, path, weights_only=not pickled)
    assert_identical(obj, loaded)
    if dtype not in UNKNOWN_TO_TORCH:
        assert_identical(through_torch(obj), loaded)


def quantized(dtype: torch.dtype) -> torch.Tensor | None:
    if dtype in (torch.quint4x2, torch.quint2x4):
        scales, points = torch.ones(4), torch.zeros(4)
        return torch.quantize_per_channel(torch.rand(4, 8), scales, points, 0, dtype)
    return torch.quantize_per_tensor(torch.rand(4, 8) * 9, 0.1, 3, dtype)


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_adversarial_floats(bits: int, path: Path) -> None:
    exponent, mantissa = {16: (8, 7), 32: (8, 23), 64: (11, 52)}[bits]
    patterns = []
    for e in (0, 1, (1 << exponent) // 2, (1 << exponent) - 2, (1 << exponent) - 1):
        for m in (0, 1, (1 << mantissa) - 1, 1 << (mantissa - 1), (1 << (mantissa - 1)) + 5):
            patterns += [e << mantissa | m, (1 << (bits - 1)) | e << mantissa | m]
    signed = [p - (1 << bits) if p >> (bits - 1) else p for p in patterns]
    ints = torch.tensor(
        signed * 700, dtype={16: torch.int16, 32: torch.int32, 64: torch.int64}[bits]
    )
    floats = [torch.bfloat16, torch.float16] if bits == 16 else [getattr(torch, f"float{bits}")]
    obj = {str(dtype): ints.clone().view(dtype) for dtype in floats}
    obj["constant"] = ints[3:4].repeat(100_000).view(floats[0])
    obj["smooth"] = torch.linspace(-1, 1, 70_001, dtype=torch.float64).to(floats[0])
    assert_identical(through_torch(obj), through_s4(obj, path))


def test_views_ties_strides_and_aliases(path: Path) -> None:
    base = torch.randn(6, 8)
    other = torch.randn(4)
    obj = {
        "base": base,
        "transposed": base.t(),
        "row": base[2],
        "every other": base[::2, 1::3],
        "expanded": other.expand(3, 4),
        "diagonal": base.diagonal(),
        "flat": base.view(-1),
        "again": base.view(6, 8),
        "tied": {"weight": other, "copy": other.clone()},
        "odd stride": torch.empty(0).set_(other.untyped_storage(), 1, (1, 1), (7, 9)),
    }
    loaded = through_s4(obj, path)
    assert_identical(through_torch(obj), loaded)
    loaded["base"][2, 0] = 42
    assert loaded["transposed"][0, 2] == loaded["row"][0] == loaded["flat"][16] == 42
    assert len(s4weights.inspect(path)["tensors"]) == 3


def test_the_storage_behind_a_view_is_saved_whole(path: Path) -> None:
    view = torch.arange(1000)[10:20]
    loaded = through_s4({"view": view}, path)
    assert_identical(through_torch({"view": view}), loaded)
    assert loaded["view"].untyped_storage().nbytes() == 8000
    assert s4weights.inspect(path)["tensors"][0]["shape"] == [1000]


def test_storages_that_no_dtype_divides(path: Path) -> None:
    obj = {"a": torch.empty(0).set_(raw(11), 1, (1,), (1,))}  # torch.load refuses it
    assert_identical(obj, through_s4(obj, path))
    assert_identical({**obj, "b": range(1)}, through_s4({**obj, "b": range(1)}, path))


def test_storages_that_were_taken_away(path: Path) -> None:
    gone = torch.ones(3)
    gone.untyped_storage().resize_(0)
    for obj in ({"layer": [gone]}, {"layer": [torch.nn.Parameter(gone)], "pickled": range(2)}):
        with pytest.raises(RuntimeError):  # torch.save writes what torch.load refuses
            through_torch(obj)
        with pytest.raises(s4weights.S4Error, match=r"layer\.0.*freed"):
            s4weights.save(obj, path)
    assert not path.exists()


def test_empty_tensors(path: Path) -> None:
    obj = [
        torch.empty(0),
        torch.empty(3, 0, 2),
        torch.tensor(3.5),
        torch.empty(0, dtype=torch.int8),
    ]
    obj += [obj[0].view(0, 5), torch.randn(4)[4:]]
    assert_identical(through_torch(obj), through_s4(obj, path))


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:Validating sparse")
def test_sparse_tensors(path: Path) -> None:
    dense = torch.tensor([[0.0, 2.0, 0, 0], [3.0, 0, 0, 1]])
    obj = {
        "coo": dense.to_sparse_coo(),
        "uncoalesced": torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,)),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((1, 2)),
        "bsc": dense.to_sparse_bsc((2, 2)),
    }
    expected = through_torch(obj)
    assert_identical(expected, through_s4(obj, path, weights_only=True))
    names = [tensor["name"] for tensor in s4weights.inspect(path)["tensors"]]
    assert names[:2] == ["coo.indices", "coo.values"] and "csr.crow_indices" in names


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:Validating sparse")
@pytest.mark.parametrize("weights_only", [True, False])
def test_sparse_tensors_on_meta(path: Path, weights_only: bool) -> None:
    dense = torch.tensor([[0.0, 2.0, 0, 0], [3.0, 0, 0, 1]])
    obj = {
        "coo": dense.to_sparse_coo(),
        "csr": dense.to_sparse_csr(),
        "csc": dense.half().to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((1, 2)),
        "bsc": dense.to_sparse_bsc((2, 2)),
        "batch": torch.stack([dense, dense]).to_sparse_csr(),
        "hybrid": torch.ones(2, 4, 3).to_sparse_csr(dense_dim=1),
        "dense": dense,
    }
    s4weights.save(obj, path)
    loaded = s4weights.load(path, "meta", weights_only=weights_only)
    for name, tensor in obj.items():
        wanted, found = tensor.to("meta"), loaded[name]
        assert found.device.type == "meta" and found.layout == wanted.layout, name
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), name
        if name not in ("coo", "dense"):
            assert found.values().shape == wanted.values().shape, name
    # Real values are checked as before, also after such a load.
    assert_identical(through_torch(obj), s4weights.load(path, weights_only=weights_only))


@pytest.mark.filterwarnings("ignore:.*torch.quantize")
def test_quantized_tensors(path: Path) -> None:
    channels = (torch.rand(4), torch.arange(4), 0)
    obj = {
        "per tensor": torch.quantize_per_tensor(torch.randn(4, 5), 0.1, 7, torch.quint8),
        "per channel": torch.quantize_per_channel(torch.randn(4, 5), *channels, torch.qint8),
        "wide": torch.quantize_per_tensor(torch.randn(4, 5), 1e-5, 0, torch.qint32),
    }
    assert_identical(through_torch(obj), through_s4(obj, path, weights_only=True))


def test_conjugate_and_negative_bits(path: Path) -> None:
    z = torch.randn(3, dtype=torch.complex64)
    obj = {"conj": z.conj(), "neg": z.conj().imag, "plain": z}
    with pytest.raises(RuntimeError):  # one storage as complex and as real numbers
        through_torch(obj)
    assert_identical(obj, through_s4(obj, path))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(path: Path) -> None:
    obj = {"nested": torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)])}
    assert_identical(through_torch(obj), through_s4(obj, path))


def test_meta_tensors(path: Path) -> None:
    obj = {"meta": torch.empty(3, 4, device="meta").t(), "real": torch.ones(2)}
    assert_identical(through_torch(obj), through_s4(obj, path, weights_only=True))


def test_many_dimensions(path: Path) -> None:
    obj = {"deep": torch.randn([1] * 30 + [2, 3])}
    assert_identical(through_torch(obj), through_s4(obj, path))


def test_hooks_are_dropped_with_a_warning(path: Path) -> None:
    tensor = torch.ones(2, requires_grad=True)
    tensor.register_hook(lambda grad: grad)
    with pytest.warns(UserWarning, match="hooks"):
        loaded = through_s4({"hooked": tensor}, path)
    assert loaded["hooked"]._backward_hooks is None or not loaded["hooked"]._backward_hooks


def test_a_dtype_that_the_format_lacks_is_stored_as_bytes() -> None:
    class Strange:
        """A dtype that PyTorch may have some day."""

        itemsize, is_complex = 2, False

        def __str__(self) -> str:
            return "torch.strange16"

    storages = s4weights._core.Storages()
    storage = torch.zeros(6, dtype=torch.int16).untyped_storage()
    storages.add(storage, "t", Strange(), (2, 3))
    name, dtype, shape, address, nbytes, _ = storages.sources({})[0]
    assert (name, dtype, list(shape), nbytes) == ("t", "bytes", [12], 12)
    assert address == storage.data_ptr()


def test_tensors_without_memory_of_their_own_have_no_tree() -> None:
    seen = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(s4weights._core.Storages().tree([tensor]))
        return tensor

    look(torch._efficientzerotensor((3,)))
    torch.func.vmap(look)(torch.ones(2, 3))
    torch.func.functionalize(look)(torch.ones(3))
    torch.func.grad(lambda x: look(x).sum())(torch.ones(3))
    assert seen == [None] * 4


def test_tensors_of_nothing_may_have_sizes_of_any_number_of_elements(path: Path) -> None:
    # The largest sizes that PyTorch accepts.
    obj = {"before": torch.empty(0, 1 << 40, 1 << 20), "after": torch.empty(1 << 40, 1 << 22, 0)}
    assert_identical(obj, through_s4(obj, path))
