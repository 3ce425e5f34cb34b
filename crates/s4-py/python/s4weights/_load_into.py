"""`load_into`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _core
from ._collection import without_collection
from ._device import HOST, Compute, Places
from ._errors import MismatchError
from ._load import Layouts, layouts_of
from ._names import Target, extra_state, targets_by_path, tensors_by_path
from ._progress import Progress, ProgressArgument
from ._report import Recorder
from ._save import require_little_endian
from ._sources import FileLike, check_flag, open_source, require_s4w
from ._storages import covering_shape, fits, read_batch
from ._torch import require_torch

if TYPE_CHECKING:
    import torch

#: The most problems that an error message names.
_NAMED = 8


class IncompatibleKeys(NamedTuple):
    """Key paths of tensors that `load_into` skipped: those missing in the file, and those only in
    the file. Tensors that a module's state dict creates only as copies count as missing.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


class Pair(NamedTuple):
    """A tensor to fill, the saved tensor (without values), and the index of its storage in the file."""

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
    """Fill existing tensors, on the host or on CUDA devices, with values from a ``.s4w`` file.

    This never needs a second copy of the tensors in memory, except for tensors that are not
    contiguous. Several threads may call it at the same time to fill different tensors.

    Args:
        state_dict: the tensors to fill: a state dict, a module, or containers of those. Tensors are
            matched by their key paths, such as ``model.layers.0.weight``. The tensors of a module
            are those of its ``state_dict()``, except for extra state, which only the module itself
            can load. Other values are not changed; use ``load(f, "meta")`` to get the file's.
        f: as in `load`. The first two arguments may be swapped.
        strict: require both sides to have the same tensors, and fill all of them. ``False`` skips
            tensors that only one side has, and those that a module's state dict creates only as
            copies.
        weights_only: as in `load`.
        threads: as in `load`.
        device: as in `load`.
        gpu_scratch: as in `load`.
        progress: as in `load`.
        storage_options: as in `load`.

    Returns:
        The key paths that were skipped because of ``strict=False``.

    Raises:
        TypeError: neither of the first two arguments is a file.
        MismatchError: names, dtypes or shapes differ; a tensor is of a kind that cannot be filled
            (sparse, quantized, distributed); with ``strict``, a module's state dict creates a
            tensor only as a copy; or tensors share memory, but not in the file. No tensor was
            changed.
        S4Error: any other failure, as in `load`. The values of the tensors are then undefined.
    """
    require_torch("load_into")
    check_flag("strict", strict)
    state_dict, f = _in_order(state_dict, f)
    compute = Compute(device, gpu_scratch)
    require_little_endian()
    recorder = Recorder("load", f)
    with recorder.begin("open"):
        source = require_s4w(open_source(f, storage_options, threads))
        targets, saved, pairs = without_collection(
            lambda: _match(state_dict, source, strict, weights_only)
        )
    with recorder.watch():
        recorder.raw_bytes = sum(pair.target.nbytes for pair in pairs)
        filled = {pair.path for pair in pairs}
        recorder.look(source, saved.keys() <= filled)
        tracker = Progress(progress, recorder.raw_bytes, "load")
        try:
            with recorder.stage("read"):
                _fill(source, compute, pairs, tracker)
            tracker.finish()
        finally:
            tracker.close()
    return IncompatibleKeys(
        [path for path in targets if path not in filled],
        [path for path in saved if path not in targets],
    )


def match(
    state_dict: Any,
    source: _core.Reader,
    *,
    strict: bool = True,
    weights_only: bool | None = True,
) -> list[Pair]:
    """Match the tensors to fill with those of a file.

    Raises:
        MismatchError: names, dtypes or shapes differ, or a tensor is of a kind that cannot be filled.
    """
    return _match(state_dict, source, strict, weights_only)[2]


def _match(
    state_dict: Any, source: _core.Reader, strict: bool, weights_only: bool | None
) -> tuple[dict[str, Target], dict[str, torch.Tensor], list[Pair]]:
    """The tensors to fill and those of the file, by path, and the pairs of both."""
    targets = targets_by_path(state_dict)
    layouts = layouts_of(source, weights_only)
    saved = tensors_by_path(layouts.obj)
    return targets, saved, _pair(state_dict, targets, saved, layouts, strict)


def _in_order(state_dict: Any, f: Any) -> tuple[Any, FileLike]:
    """The state dict and the file, in that order, whichever was given first."""
    if _is_file(f):
        return state_dict, f
    if _is_file(state_dict):
        return f, state_dict
    kinds = f"{type(state_dict).__name__} and {type(f).__name__}"
    raise TypeError(
        f"load_into(state_dict, f): expected a path, a URL or a binary stream, not {kinds}"
    )


def _is_file(f: Any) -> bool:
    return isinstance(f, (str, os.PathLike)) or callable(getattr(f, "read", None))


def _pair(
    state_dict: Any,
    targets: dict[str, Target],
    saved: dict[str, torch.Tensor],
    layouts: Layouts,
    strict: bool,
) -> list[Pair]:
    problems = []
    if strict:
        problems += [f"`{path}` is not in the file" for path in targets.keys() - saved.keys()]
        only = saved.keys() - targets.keys()
        # Modules load their extra state themselves, so that it may be in the file only.
        beside = tuple(f"{path}." for path in extra_state(state_dict)) if only else ()
        left = [path for path in only if not f"{path}.".startswith(beside)]
        problems += [f"`{path}` is only in the file" for path in left]
    pairs = []
    for path in (path for path in targets if path in saved):
        (_, target, is_own), there = targets[path], saved[path]
        if not (is_own or strict):
            continue
        differs = _difference(target, there, layouts)
        if not (differs or is_own):
            differs = (
                "is a copy created by the module's `state_dict()`: load the file and copy it yourself "
                "(`load_into` with `strict=False` skips it)"
            )
        if differs:
            problems.append(f"`{path}` {differs}")
        else:
            number = layouts.numbers[there.untyped_storage()._cdata]
            pairs.append(Pair(path, target, there, number))
    if not problems:
        problems = _shared(pairs)
    if problems:
        more = len(problems) - _NAMED
        rest = [f"and {more} more"] if more > 0 else []
        raise MismatchError("; ".join(sorted(problems)[:_NAMED] + rest))
    return pairs


def _difference(target: torch.Tensor, saved: torch.Tensor, layouts: Layouts) -> str | None:
    """Return the reason why a tensor cannot be filled with the saved one, or ``None`` if it can."""
    import torch

    if kind := _unusual(target, layouts):
        return f"is {kind}: load the file and copy it yourself"
    if kind := _unusual(saved, layouts):
        return f"is {kind} in the file: load the file and copy it yourself"
    if target.dtype != saved.dtype or target.shape != saved.shape:
        return (
            f"is {target.dtype} {list(target.shape)}, but {saved.dtype} {list(saved.shape)} in the file"
        )
    if target.is_meta:
        return "has no memory"
    there, item, offset = target.untyped_storage().nbytes(), target.itemsize, target.storage_offset()
    # Contiguous, as nearly all are, is the quick case.
    if target.is_contiguous():
        enough, overlap = offset * item + target.nbytes <= there or not target.nbytes, False
    else:
        enough = fits(there, item, offset, target.shape, target.stride())
        overlap = _overlaps(target)
    if not enough:
        return "does not have enough memory for its elements: its memory was freed or shrunk"
    if overlap:
        has = "has" if torch._debug_has_internal_overlap(target) == 1 else "may have"
        return f"{has} several elements at the same memory location"
    stored = saved.untyped_storage()._cdata in layouts.numbers
    return None if stored else "has no values in the file"


def _overlaps(target: torch.Tensor) -> bool:
    """Whether several elements may share a place in memory: unless each step is longer than all that
    the shorter ones span, which holds for all views but those of `expand`, `unfold` and `as_strided`.
    """
    reach = 0
    dimensions = zip(target.stride(), target.shape, strict=True)
    for step, size in sorted((step, size) for step, size in dimensions if size != 1):
        if size and step <= reach:
            return True
        reach += (size - 1) * step
    return False


def _unusual(tensor: torch.Tensor, layouts: Layouts) -> str | None:
    """The kind of a tensor that is anything but strided elements of a single storage."""
    import torch

    kind = type(tensor)
    is_plain = kind is torch.Tensor or kind is torch.nn.Parameter or kind is torch.nn.Buffer
    if not is_plain and torch.nn.parameter.is_lazy(tensor):
        return "not initialized"
    if tensor.layout is not torch.strided:
        return f"of layout {str(tensor.layout).removeprefix('torch.')}"
    if tensor.is_quantized:
        return f"quantized ({str(tensor.dtype).removeprefix('torch.')})"
    if tensor.is_nested:
        return "a nested tensor"
    return None if is_plain else layouts.stand_ins.kind(tensor) or f"a {kind.__name__}"


class _Span(NamedTuple):
    """The bytes between the first and the last element of a tensor to fill."""

    device: str
    start: int
    end: int
    pair: Pair
    #: For each dimension of more than one element: the steps in bytes, of the tensor and in the file.
    steps: list[tuple[int, int, int]]


def _span(pair: Pair) -> _Span:
    target, saved, item = pair.target, pair.saved, pair.target.itemsize
    dimensions = zip(target.shape, target.stride(), saved.stride(), strict=True)
    steps = [(size, a * item, b * item) for size, a, b in dimensions if size > 1]
    start = target.data_ptr()
    return _Span(str(target.device), start, start + _extent(steps) + item, pair, steps)


def _extent(steps: list[tuple[int, int, int]], period: int = 0) -> int:
    """The bytes from the first element to the last, without steps that are multiples of ``period``."""
    return sum((size - 1) * step for size, step, _ in steps if not period or step % period)


def _bounds(target: torch.Tensor) -> tuple[int, int, int]:
    """A number of the tensor's device, and where its memory begins and ends. It may be the number
    of a device of another type, too.
    """
    start, item = target.data_ptr(), target.itemsize
    if target.is_contiguous():
        return target.get_device(), start, start + target.nbytes
    steps = zip(target.shape, target.stride(), strict=True)
    end = start + item * (1 + sum((size - 1) * step for size, step in steps))
    return target.get_device(), start, end


def _shared(pairs: list[Pair]) -> list[str]:
    """Problems with tensors that share memory but are different tensors in the file."""
    pairs = [pair for pair in pairs if pair.target.nbytes]
    bounds = sorted(_bounds(pair.target) for pair in pairs)
    if all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(bounds)):
        return []
    spans = sorted((_span(pair) for pair in pairs), key=lambda span: span[:3])
    problems = []
    before: list[_Span] = []
    for span in spans:
        before = [a for a in before if a.device == span.device and a.end > span.start]
        for a in before:
            if not (_apart(a, span) or _alike(a, span)):
                names = f"`{a.pair.path}` and `{span.pair.path}`"
                problems.append(f"{names} share memory here, but not in the file")
        before.append(span)
    return problems


def _apart(a: _Span, b: _Span) -> bool:
    """Whether two tensors take turns in memory, as rows ``[::2]`` and ``[1::2]`` do, or columns
    ``[:, :4]`` and ``[:, 4:]``: in a period of some bytes, each has a part of its own.
    """
    steps = {step for _, step, _ in a.steps + b.steps}
    for period in steps | {gcd(*steps)}:
        ahead = (b.start - a.start) % period if period else 0
        if (
            ahead >= _extent(a.steps, period) + a.pair.target.itemsize
            and period - ahead >= _extent(b.steps, period) + b.pair.target.itemsize
        ):
            return True
    return False


def _alike(a: _Span, b: _Span) -> bool:
    """Whether two tensors share memory in the file just as they do here."""
    if a.pair.number != b.pair.number:
        return False
    flips, flips_b = _flips(a.pair), _flips(b.pair)
    ahead = _offset(b.pair.saved) - _offset(a.pair.saved)
    if not any(flips + flips_b) and all(here == there for _, here, there in a.steps + b.steps):
        return ahead == b.start - a.start
    # The memory is arranged differently, but each element of one is an element of the other.
    same = a.start == b.start and ahead == 0 and sorted(a.steps) == sorted(b.steps)
    return same and flips == flips_b and a.pair.target.dtype == b.pair.target.dtype


def _flips(pair: Pair) -> tuple[bool, bool]:
    """Whether signs differ between stored bytes and memory: of imaginary parts, of all values."""
    target, saved = pair.target, pair.saved
    return target.is_conj() != saved.is_conj(), target.is_neg() != saved.is_neg()


def _offset(saved: torch.Tensor) -> int:
    """The offset of a saved tensor in its storage, in bytes."""
    return int(saved.storage_offset() * saved.itemsize)


def _fill(reader: _core.Reader, compute: Compute, pairs: list[Pair], progress: Progress) -> None:
    import torch

    direct: dict[int, torch.Tensor] = {}
    requests: list[_core.PlacedRequest] = []
    later: list[Pair] = []
    places = Places()
    for pair in pairs:
        where = direct_place(pair, compute, places)
        if where is None or pair.number in direct:
            later.append(pair)
        elif pair.target.nbytes:
            direct[pair.number] = pair.target
            requests.append((pair.number, pair.target.data_ptr(), pair.target.nbytes, where))
    _try_copies(later, direct)
    read_batch(reader, compute, requests, progress)
    for target in direct.values():
        if not target.is_inference():
            torch.autograd.graph.increment_version(target)
    for pair in later:
        _copy(reader, pair, direct.get(pair.number), progress)


def _try_copies(pairs: list[Pair], direct: dict[int, torch.Tensor]) -> None:
    """Raise `MismatchError` for values that PyTorch cannot copy, such as conjugated values of some
    dtypes, before any tensor is changed.
    """
    import torch

    tried = set()
    for path, target, saved, number in pairs:
        if number in direct and direct[number].data_ptr() == target.data_ptr():
            continue
        kind = (target.dtype, target.device, *_flags(target), *_flags(saved))
        if kind in tried or not target.nbytes:
            continue
        tried.add(kind)
        try:
            values = _flagged(torch.empty(1, dtype=saved.dtype, device="cpu"), saved)
            set_values(_flagged(torch.empty(1, dtype=target.dtype, device=target.device), target), values)
        except RuntimeError as error:
            what = f"`{path}` cannot be copied: load the file and copy it yourself ({error})"
            raise MismatchError(what) from error


def _flags(tensor: torch.Tensor) -> tuple[bool, bool]:
    return tensor.is_conj(), tensor.is_neg()


def _flagged(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The stored values as those of a tensor that may be a conjugated or negated view."""
    import torch

    values = values.conj() if like.is_conj() else values
    return torch._neg_view(values) if like.is_neg() else values


def direct_place(pair: Pair, compute: Compute, places: Places) -> tuple[int, int] | None:
    """The place of the tensor's memory, if the stored bytes can be read straight into it."""
    target, saved = pair.target, pair.saved
    if not target.is_contiguous() or covering_shape(saved) is None:
        return None
    # The stored bytes of conjugated and negated views are not their values.
    if target.is_conj() or target.is_neg() or saved.is_conj() or saved.is_neg():
        return None
    if target.is_cpu:
        return HOST
    if not target.is_cuda or compute.engine((target.get_device(),)) is None:
        return None
    return places.of(target.untyped_storage())


def _copy(reader: _core.Reader, pair: Pair, other: torch.Tensor | None, progress: Progress) -> None:
    """Fill a tensor from ``other``, which was filled from the same storage, or through host memory."""
    import torch

    target, saved = pair.target, pair.saved
    as_stored = covering_shape(saved) is not None and not saved.is_conj() and not saved.is_neg()
    if other is not None and other.dtype == target.dtype and as_stored:
        if other.data_ptr() != target.data_ptr() or other.device != target.device:
            set_values(target, other.reshape(target.shape))
        return
    nbytes = saved.untyped_storage().nbytes()
    storage = torch.UntypedStorage(nbytes)
    if nbytes:
        reader.read_into([(pair.number, storage.data_ptr(), nbytes)], progress.native())
    values = torch.empty(0, dtype=saved.dtype, device="cpu").set_(
        storage, saved.storage_offset(), saved.shape, saved.stride()
    )
    set_values(target, _flagged(values, saved))
    progress.advance(target.nbytes)


def set_values(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values into a tensor, whatever mode it was made in."""
    import torch

    # Tensors made in inference mode can be changed in it only.
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        target.copy_(values)
