"""`load_into`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _core
from ._collection import NoCollection
from ._device import HOST, Compute, place
from ._errors import MismatchError
from ._load import build, choose_unpickler
from ._names import join, tensors_by_path
from ._progress import Progress, ProgressArgument
from ._save import require_little_endian
from ._sources import FileLike, open_source, require_s4w
from ._storages import StorageReader, covering_shape, read_batch

if TYPE_CHECKING:
    import torch

#: The most problems that an error message names.
_NAMED = 8


class IncompatibleKeys(NamedTuple):
    """Key paths of tensors that exist on one side only, which `load_into` passed over: missing in
    the file, or unexpected there.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


class Pair(NamedTuple):
    """A tensor to be filled, its saved counterpart (without values), and the index of that one's
    storage in the file.
    """

    path: str
    target: torch.Tensor
    saved: torch.Tensor
    number: int


def load_into(
    state_dict: Any,
    f: Any,
    *,
    strict: bool = True,
    weights_only: bool | None = None,
    threads: int | None = None,
    device: str = "auto",
    gpu_scratch: int | None = None,
    progress: ProgressArgument = None,
    storage_options: Mapping[str, str] | None = None,
) -> IncompatibleKeys:
    """Fills existing tensors, on the host or on CUDA devices, with the values of a ``.s4w`` file.
    There is never a second copy of them in memory, except of tensors that are not contiguous.
    Several threads may call it at once, to fill different tensors.

    Args:
        state_dict: where the tensors are: a state dict, a module, or containers of those. Tensors
            are matched by their key paths, such as ``model.layers.0.weight``; the tensors of a
            module are those of its ``state_dict()``. Other values are left as they are;
            ``load(f, "meta")`` shows the file's.
        f: as in `load`. The first two arguments may be swapped.
        strict: whether both sides must have the same tensors.
        weights_only: as in `load`.
        threads: as in `load`.
        device: as in `load`.
        gpu_scratch: as in `load`.
        progress: as in `load`.
        storage_options: as in `load`.

    Returns:
        The key paths that ``strict=False`` passed over.

    Raises:
        TypeError: neither of the first two arguments is a file.
        MismatchError: names, dtypes or shapes differ, or a tensor is of a kind that cannot be
            filled (sparse, quantized, distributed). No tensor was touched.
        S4Error: any other failure, as in `load`. The tensors' values are then unspecified.
    """
    state_dict, f = _in_order(state_dict, f)
    compute = Compute(device, gpu_scratch)
    require_little_endian()
    source = require_s4w(open_source(f, storage_options, threads))
    with NoCollection():
        targets = tensors_by_path(state_dict)
        saved, numbers = _saved(source, weights_only, compute)
        pairs = _pair(targets, saved, numbers, strict, _extra_state(state_dict))
    tracker = Progress(progress, sum(pair.target.nbytes for pair in pairs), "load")
    try:
        _fill(source, compute, pairs, tracker)
        tracker.finish()
    finally:
        tracker.close()
    return IncompatibleKeys(
        [path for path in targets if path not in saved],
        [path for path in saved if path not in targets],
    )


def match(
    state_dict: Any,
    source: _core.Reader,
    compute: Compute,
    *,
    strict: bool = True,
    weights_only: bool | None = True,
) -> list[Pair]:
    """Matches tensors with those of a file that are to fill them.

    Raises:
        MismatchError: names, dtypes or shapes differ, or a tensor is of a kind that cannot be filled.
    """
    saved, numbers = _saved(source, weights_only, compute)
    return _pair(tensors_by_path(state_dict), saved, numbers, strict, _extra_state(state_dict))


def _in_order(state_dict: Any, f: Any) -> tuple[Any, FileLike]:
    """The state dict and the file, in that order, whichever was given first."""
    if _is_file(f):
        return state_dict, f
    if _is_file(state_dict):
        return f, state_dict
    kinds = f"{type(state_dict).__name__} and {type(f).__name__}"
    raise TypeError(
        f"load_into(state_dict, f): a path, a URL or a binary stream expected, not {kinds}"
    )


def _is_file(f: Any) -> bool:
    return isinstance(f, (str, os.PathLike)) or callable(getattr(f, "read", None))


def _saved(
    source: _core.Reader, weights_only: bool | None, compute: Compute
) -> tuple[dict[str, torch.Tensor], dict[int, int]]:
    """The file's tensors, without values, by key path, and the indices of their storages."""
    storages = StorageReader(source, source.tensors(), "meta", Progress(None, 0, "load"), compute)
    pickle_module = choose_unpickler(None, weights_only, {})
    obj = build(source, source.tree(), storages, "meta", pickle_module, {"encoding": "utf-8"})
    return tensors_by_path(obj), storages.numbers()


def _pair(
    targets: dict[str, torch.Tensor],
    saved: dict[str, torch.Tensor],
    numbers: dict[int, int],
    strict: bool,
    beside: tuple[str, ...],
) -> list[Pair]:
    problems = []
    if strict:
        problems += [f"`{path}` is not in the file" for path in targets.keys() - saved.keys()]
        only = (path for path in saved.keys() - targets.keys() if not path.startswith(beside))
        problems += [f"`{path}` is in the file only" for path in only]
    pairs = []
    for path in (path for path in targets if path in saved):
        target, there = targets[path], saved[path]
        differs = _difference(target, there)
        if differs:
            problems.append(f"`{path}` {differs}")
        else:
            pairs.append(Pair(path, target, there, numbers[there.untyped_storage()._cdata]))
    if not problems:
        problems = _shared(pairs)
    if problems:
        more = len(problems) - _NAMED
        rest = [f"and {more} more"] if more > 0 else []
        raise MismatchError("; ".join(sorted(problems)[:_NAMED] + rest))
    return pairs


def _extra_state(obj: Any, path: str = "") -> tuple[str, ...]:
    """The path prefixes of the extra state of modules: modules load that themselves, so tensors
    below these paths may be in the file only.
    """
    import torch

    if isinstance(obj, torch.nn.Module):
        state = obj.state_dict(keep_vars=True)
        names = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
        return tuple(f"{join(path, name)}." for name in names)
    if not isinstance(obj, dict):
        return ()
    return tuple(p for key, value in obj.items() for p in _extra_state(value, join(path, key)))


def _difference(target: torch.Tensor, saved: torch.Tensor) -> str | None:
    """Why a tensor cannot be filled with the saved one; ``None`` if it can."""
    if target.dtype != saved.dtype or target.shape != saved.shape:
        return (
            f"is {target.dtype} {list(target.shape)}, in the file {saved.dtype} {list(saved.shape)}"
        )
    for tensor, where in ((target, ""), (saved, " in the file")):
        kind = _unusual(tensor)
        if kind:
            return f"is {kind}{where}: load the file and copy it yourself"
    return "has no memory" if target.device.type == "meta" else None


def _unusual(tensor: torch.Tensor) -> str | None:
    """The kind of a tensor that is anything but strided elements of a single storage."""
    import torch

    if tensor.layout is not torch.strided:
        return f"of layout {str(tensor.layout).removeprefix('torch.')}"
    if tensor.is_quantized:
        return "quantized"
    if tensor.is_nested:
        return "a nested tensor"
    plain = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return None if type(tensor) in plain else f"a {type(tensor).__name__}"


def _shared(pairs: list[Pair]) -> list[str]:
    """Problems with tensors that share memory but are different tensors in the file."""
    spans = []
    for pair in pairs:
        if pair.target.is_contiguous() and pair.target.nbytes:
            start = pair.target.data_ptr()
            spans.append((str(pair.target.device), start, start + pair.target.nbytes, pair))
    spans.sort(key=lambda span: span[:3])
    problems = []
    for (device, start, end, a), (next_device, next_start, next_end, b) in pairwise(spans):
        same = (start, end) == (next_start, next_end) and _same_values(a, b)
        if device == next_device and next_start < end and not same:
            problems.append(f"`{a.path}` and `{b.path}` share memory, but not in the file")
    return problems


def _same_values(a: Pair, b: Pair) -> bool:
    return a.number == b.number and (a.saved.storage_offset(), a.saved.stride()) == (
        b.saved.storage_offset(),
        b.saved.stride(),
    )


def _fill(reader: _core.Reader, compute: Compute, pairs: list[Pair], progress: Progress) -> None:
    import torch

    direct: dict[int, torch.Tensor] = {}
    requests: list[_core.PlacedRequest] = []
    later: list[Pair] = []
    for pair in pairs:
        where = direct_place(pair, compute)
        if where is None or pair.number in direct:
            later.append(pair)
        elif pair.target.nbytes:
            direct[pair.number] = pair.target
            requests.append((pair.number, pair.target.data_ptr(), pair.target.nbytes, where))
    read_batch(reader, compute, requests, progress)
    with torch.no_grad():
        for target in direct.values():
            if not target.is_inference():
                torch.autograd.graph.increment_version(target)
        for pair in later:
            _copy(reader, pair, direct.get(pair.number), progress)


def direct_place(pair: Pair, compute: Compute) -> tuple[int, int] | None:
    """Where the tensor's memory is, if the stored bytes can be read straight into it."""
    target, saved = pair.target, pair.saved
    whole = covering_shape(saved) is not None and target.is_contiguous()
    if not whole or target.is_conj() or target.is_neg() or target.is_quantized:
        return None
    if target.device.type == "cpu":
        return HOST
    if target.device.type != "cuda" or compute.engine((target.device.index,)) is None:
        return None
    return place(target.untyped_storage())


def _copy(reader: _core.Reader, pair: Pair, other: torch.Tensor | None, progress: Progress) -> None:
    """Fills a tensor from ``other``, which was filled from the same storage, or through host
    memory.
    """
    import torch

    target, saved = pair.target, pair.saved
    if other is not None and other.dtype == target.dtype and covering_shape(saved) is not None:
        if other.data_ptr() != target.data_ptr() or other.device != target.device:
            target.copy_(other.reshape(target.shape))
        return
    nbytes = saved.untyped_storage().nbytes()
    storage = torch.UntypedStorage(nbytes)
    if nbytes:
        reader.read_into([(pair.number, storage.data_ptr(), nbytes)], progress.native())
    values = torch.empty(0, dtype=saved.dtype, device="cpu").set_(
        storage, saved.storage_offset(), saved.shape, saved.stride()
    )
    target.copy_(values)
    progress.advance(target.nbytes)
