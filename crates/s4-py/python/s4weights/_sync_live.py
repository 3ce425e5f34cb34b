"""Tensors in use that are updated in place, from one checkpoint to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _core
from ._device import Compute, Places
from ._errors import UnsafeLoadError
from ._load_into import direct_place, match, set_values
from ._names import tensors_by_path, walk_targets, walk_tensors
from ._progress import Progress
from ._storages import covering_shape, is_strided, read_batch

if TYPE_CHECKING:
    import torch


class _Memory(NamedTuple):
    """A tensor's properties, and the place of its elements."""

    kind: type
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    #: Conjugated, negated.
    signs: tuple[bool, bool]
    #: The storage's address and size: a process that sleeps may have freed it.
    start: int
    nbytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Memory | None:
        """``None`` for tensors without plain memory, such as sparse ones."""
        try:
            storage = tensor.untyped_storage()
            return cls(
                type(tensor),
                tensor.dtype,
                tensor.device,
                tuple(tensor.shape),
                tensor.stride(),
                tensor.storage_offset(),
                (tensor.is_conj(), tensor.is_neg()),
                storage.data_ptr(),
                storage.nbytes(),
            )
        except (RuntimeError, ValueError):  # Uninitialized parameters raise the latter.
            return None


class LiveWeights:
    """The tensors of a module or of containers. They are decoded in place; a tensor for which that
    is impossible (not contiguous, or on a device without a decoder) is filled from a copy in host
    memory that is decoded instead.
    """

    def __init__(self, weights: object, compute: Compute) -> None:
        self._weights, self._compute = weights, compute
        #: Tree and tensors of the last checkpoint, to see whether the next one has the same.
        self._shape: tuple[str | None, list[_core.TensorInfo]] | None = None
        #: The tensors in their state when they were matched with a checkpoint, by their paths.
        self._matched: list[tuple[str, _Memory | None]] = []
        #: The tensors to decode into, by the index of the tensor in the checkpoint.
        self._places: dict[int, torch.Tensor] = {}
        #: Tensors that are filled from those: each with the values in such a place.
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; those that have several names count for each."""
        return sum(tensor.nbytes for _, tensor in walk_tensors(self._weights, as_state=True))

    def replaced(self) -> bool:
        """Whether something was replaced, converted, moved or freed since tensors were last matched
        with a checkpoint: the memory that was filled then may no longer be part of the weights.
        """
        return self._now() != self._matched

    def _now(self) -> list[tuple[str, _Memory | None]]:
        found = walk_targets(self._weights)
        return [(target.path, _Memory.of(target.tensor)) for target in found]

    def fits(self, reader: _core.Reader) -> bool:
        """Whether a checkpoint has the tensors that the last one had."""
        return self._shape == (reader.tree(), reader.tensors())

    def read(self, reader: _core.Reader) -> None:
        """Fill the tensors, whatever their current values are.

        Raises:
            MismatchError: names, dtypes or shapes differ, or a tensor is of a kind that cannot be
                filled, or has no memory. No tensor was changed.
        """
        if not self.fits(reader) or self.replaced():
            self._match(reader)
        read_batch(reader, self._compute, self._requests(), Progress(None, 0, "sync"))
        self._done()

    def apply(self, reader: _core.Reader, whole: Callable[[], _core.Reader]) -> None:
        """Apply a delta: the tensors hold the values of its parent, and get its own.

        Args:
            reader: the delta, which `fits`; no tensor was `replaced`.
            whole: opens the delta together with its chain, for tensors that a device cannot update.
        """
        requests = self._requests()
        there = [request for request in requests if request[3][0] >= 0]
        engine = self._compute.required({request[3][0] for request in there}) if there else None
        host = [request[:3] for request in requests if request[3][0] < 0]
        if host:
            reader.apply_into(host, None)
        if engine is not None:
            left = reader.apply_into_device(engine, there, None)
            if left:
                whole().read_into_device(engine, [there[place] for place in left], None)
        self._done()

    def _requests(self) -> list[_core.PlacedRequest]:
        # The current streams may have changed since the last call.
        places = Places()
        return [
            (number, tensor.data_ptr(), tensor.nbytes, places.of(tensor.untyped_storage()))
            for number, tensor in self._places.items()
            if tensor.nbytes
        ]

    def _match(self, reader: _core.Reader) -> None:
        import torch

        if reader.form() == "pickle":
            raise UnsafeLoadError("the checkpoint contains a pickle: it was not published as weights")
        # If this fails, nothing is matched, and memory that was replaced can be freed.
        self._shape, self._places, self._copies = None, {}, []
        now = self._now()
        # Aliases of the same memory: setting `.data` of a tensor later does not redirect them.
        found = match(self._weights, reader)
        pairs = [pair._replace(target=pair.target.detach()) for pair in found]
        places: dict[int, torch.Tensor] = {}
        rest, devices = [], Places()
        for pair in pairs:
            direct = direct_place(pair, self._compute, devices) is not None
            if direct and pair.number not in places:
                places[pair.number] = pair.target
            else:
                rest.append(pair)
        copies = []
        for pair in rest:
            there = places.get(pair.number)
            if there is None:
                nbytes = pair.saved.untyped_storage().nbytes()
                there = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
                places[pair.number] = there
            elif covering_shape(pair.saved) is not None and there.dtype == pair.saved.dtype:
                copies.append((pair.target, there.reshape(pair.saved.shape)))
                continue
            start = there.storage_offset() * there.itemsize // pair.saved.itemsize
            values = torch.empty(0, dtype=pair.saved.dtype, device=there.device).set_(
                there.untyped_storage(),
                start + pair.saved.storage_offset(),
                pair.saved.shape,
                pair.saved.stride(),
            )
            copies.append((pair.target, values))
        self._places, self._copies, self._matched = places, copies, now
        self._shape = (reader.tree(), reader.tensors())

    def _done(self) -> None:
        import torch

        with torch.no_grad():
            # Not the aliases: a parameter recreated on the same memory has its own version.
            for target in walk_targets(self._weights):
                if not target.tensor.is_inference():
                    torch.autograd.graph.increment_version(target.tensor)
            for tensor, values in self._copies:
                same = tensor.device == values.device and tensor.data_ptr() == values.data_ptr()
                if not same:
                    set_values(tensor, values)


def _unusual(tensor: torch.Tensor) -> str:
    """The unusual property of a tensor that is not plain strided elements."""
    import torch

    if tensor.layout is not torch.strided:
        return f"of layout {str(tensor.layout).removeprefix('torch.')}"
    if tensor.is_quantized:
        return f"quantized ({str(tensor.dtype).removeprefix('torch.')})"
    if not (tensor.is_cpu or tensor.is_cuda):
        return f"on the device {tensor.device}"
    return "a tensor that stands for another one"


def tensors_of(weights: Any) -> dict[str, torch.Tensor]:
    """The tensors of a module or of containers, by key path.

    Raises:
        ValueError: there are none, or two have the same path, or one is not a plain tensor.
    """
    import torch

    found = {}
    for path, tensor in tensors_by_path(weights).items():
        if torch.nn.parameter.is_lazy(tensor):
            raise ValueError(f"`{path}` is not initialized: it cannot be published")
        found[path] = tensor.detach()
    for path, tensor in found.items():
        if type(tensor) is not torch.Tensor:
            # Such as a DTensor: its memory does not hold the values that it represents.
            kind = type(tensor).__name__
            raise ValueError(f"`{path}` is a {kind}: only plain tensors can be published")
        if not is_strided(tensor):
            raise ValueError(f"`{path}` is {_unusual(tensor)}: it cannot be published")
        # Conjugated and negated views would be published as a pickle, which subscribers refuse.
        found[path] = tensor.resolve_conj().resolve_neg()
    if not found:
        raise ValueError(f"{type(weights).__name__} contains no tensors")
    return found
