"""How values stay what they were at the call while a save in the background goes on: ``stage=``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from . import _core
from ._device import HOST, SCARCE_SCRATCH, current_streams
from ._errors import LimitError, S4Error

if TYPE_CHECKING:
    from ._pending import HostBuffer
    from ._storages import StorageWriter

Stage = Literal["auto", "device", "host", "lazy"]

#: Bytes of a device's memory that copies leave free, and its share of the whole: one in so many.
LEAST_FREE, FREE_SHARE = 1 << 30, 10


class Budget(NamedTuple):
    """What staging may take."""

    #: Bytes of host memory for copies, and for what waits to be uploaded; ``None``: no limit.
    host: int | None = None
    #: Bytes of each device's memory that copies leave free; ``None``: 1 GiB, or a tenth if that is
    #: more.
    device_reserve: int | None = None
    #: Bytes of each device's memory that encoding takes besides.
    scratch: int = 0

    def check(self) -> Budget:
        """Raises `ValueError` for what is no number of bytes."""
        for name, value in (
            ("staging_memory", self.host),
            ("device_reserve", self.device_reserve),
        ):
            if value is not None and (type(value) is not int or value < 0):
                raise ValueError(f"{name}={value!r}: a number of bytes expected")
        return self


def check_stage(stage: str, blocking: bool) -> None:
    """Refuses what is no way of staging, or has nothing to do in a save that blocks."""
    if stage not in get_args(Stage):
        raise ValueError(f'stage={stage!r}: "auto", "device", "host" or "lazy" expected')
    if blocking and stage != "auto":
        raise ValueError(f"stage={stage!r}: only with blocking=False")


class StagedValues:
    """The values of a save, wherever they are read from."""

    def __init__(self, stage: str, storages: StorageWriter, sources: _core.Sources) -> None:
        #: What was done: ``"device"``, ``"host"`` or ``"lazy"``.
        self.stage = stage
        self.sources = sources
        #: What encodes those on devices; ``None``: there are none.
        self.engine: _core.CudaEngine | None = None
        #: Whether the caller is kept waiting until the native part needs its tensors no more.
        self.waits = False
        #: Whether tensors in host memory are read where the caller has them.
        self.reads_host = False
        #: Bytes that may wait to be uploaded while values are needed; ``None``: no limit.
        self.upload_memory: int | None = None
        # Keeps all storages alive, whatever the caller does.
        self._held: StorageWriter | None = storages
        self._copies: _core.DeviceCopies | None = None
        self._host_copies: _core.HostCopies | None = None
        self._ordinals: list[int] = []
        # Host memory with copies: until the save ends.
        self._buffer: HostBuffer | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the caller may go on as soon as the work for it is queued."""
        return self.stage != "lazy" and not self.waits

    def settle(self) -> None:
        """In the background: waits until copies are made, and lets go of what was copied."""
        if self._copies is not None:
            self._copies.wait()
        if self.is_ready:
            self._held = None

    def wait_copied(self) -> None:
        """Waits until copies on devices are made."""
        if self._copies is not None:
            self._copies.wait()

    def hold_streams(self) -> None:
        """Has what the current streams are given from now on wait for the copies."""
        if self._copies is None:
            return
        import torch

        for ordinal in sorted(self._ordinals):
            self._copies.hold(ordinal, torch.cuda.current_stream(ordinal).cuda_stream)

    def release(self) -> None:
        """Nothing reads the caller's tensors or copies on devices any more."""
        self._held = None
        if self._copies is not None:
            self._copies.free()

    def end(self) -> None:
        """The save has ended."""
        self.release()
        if self._host_copies is not None:
            self._host_copies.free()
        self._buffer = None


def stage_values(
    storages: StorageWriter,
    engine: _core.CudaEngine | None,
    stage: str,
    buffer: HostBuffer,
    budget: Budget,
    streams: Mapping[int, int] | None = None,
) -> StagedValues:
    """Ensures that values are read as they are now.

    With ``"lazy"`` that is up to the caller, until the save has read them; ``streams`` may be those of
    `streams_behind` then, from an earlier time.

    Raises:
        LimitError: ``stage="device"``, and there is no room on a device.
        S4Error: ``stage="device"``, and devices are not used by `_core` here.
    """
    ordinals = storages.native.devices()
    if engine is None and stage == "device" and ordinals:
        raise S4Error(
            'stage="device": values on CUDA devices go through host memory here; with '
            'stage="auto" they are copied there'
        )
    if engine is None:
        streams = {}
    elif stage == "lazy":
        streams = streams_behind(engine, ordinals) if streams is None else streams
    else:
        streams = current_streams(ordinals)
    sources = storages.sources(engine, streams)
    on_devices = sources.device_nbytes() > 0
    copies = None
    if stage in ("auto", "device"):
        copies = copy_on_devices(sources, engine, streams, stage, budget)
        stage = "host" if copies is None and (on_devices or stage == "auto") else "device"
    values = StagedValues(stage, storages, sources)
    if stage == "host" and on_devices:
        values._host_copies = copy_to_host(sources, engine, budget)
    host = values._host_copies
    values._copies, values._ordinals = copies, sorted(streams)
    values.engine = engine if on_devices and host is None else None
    values.waits = stage == "host" and on_devices and host is None
    if host is not None and budget.host is not None:
        budget = budget._replace(host=max(0, budget.host - host.nbytes()))
    values.upload_memory = budget.host
    on_host = sources.on_host()
    if copies is not None:
        sources.move_to(copies.places())
    elif host is not None:
        sources.move_to([(address, HOST) for address in host.addresses()])
    _stage_host(values, storages, on_host, stage, buffer, budget)
    return values


def streams_behind(engine: _core.CudaEngine, ordinals: Iterable[int]) -> dict[int, int]:
    """For devices, by their numbers, streams that come after what was queued so far, and after nothing else."""
    return {n: engine.after(n, stream) for n, stream in current_streams(ordinals).items()}


def copy_on_devices(
    sources: _core.Sources,
    engine: _core.CudaEngine | None,
    ordinals: Iterable[int],
    stage: str,
    budget: Budget,
) -> _core.DeviceCopies | None:
    """Copies on the devices; ``None`` if there is nothing to copy, or no room."""
    if engine is None or not sources.device_nbytes():
        return None
    try:
        return engine.copy(sources, _leave(engine, ordinals, budget))
    except LimitError as error:
        if stage == "device":
            raise LimitError(
                f'stage="device": {error}; stage="auto" goes through host memory then'
            ) from error
        return None


def copy_to_host(
    sources: _core.Sources, engine: _core.CudaEngine | None, budget: Budget
) -> _core.HostCopies | None:
    """Copies in page-locked memory of the host; ``None`` if there is nothing to copy, or no room."""
    nbytes = sources.device_nbytes()
    if engine is None or not nbytes or (budget.host is not None and nbytes > budget.host):
        return None
    try:
        return engine.copy_to_host(sources)
    except S4Error:  # What else is wrong with a device, encoding on it tells.
        return None


def _leave(engine: _core.CudaEngine, ordinals: Iterable[int], budget: Budget) -> dict[int, int]:
    """Bytes of each device's memory that copies leave free.

    The copies take no memory of PyTorch's own: what it holds and does not use at the moment is what
    the next forward pass works in, so that a copy there would make it ask for more. What it had
    before, and may ask for again, is left to it, too.
    """
    leave = {}
    for ordinal in ordinals:
        reserve = budget.device_reserve
        if reserve is None:
            reserve = max(LEAST_FREE, engine.memory(ordinal)[1] // FREE_SHARE)
        leave[ordinal] = reserve + min(budget.scratch, SCARCE_SCRATCH) + _regrowth(ordinal)
    return leave


def _regrowth(ordinal: int) -> int:
    """Bytes that PyTorch's allocator once had on a device, and has given back."""
    import torch

    try:
        stats = torch.cuda.memory_stats(ordinal)
    except RuntimeError:  # An allocator of the user's own keeps no statistics.
        return 0
    peak = int(stats.get("reserved_bytes.all.peak", 0))
    return max(0, peak - int(stats.get("reserved_bytes.all.current", 0)))


def _stage_host(
    values: StagedValues,
    storages: StorageWriter,
    on_host: list[tuple[int, int]],
    stage: str,
    buffer: HostBuffer,
    budget: Budget,
) -> None:
    """Copies what is not read on a device to the buffer; values ``on_host``, given by number and bytes,
    may also be read where they are.
    """
    sources = values.sources
    copied = sources.on_host(elsewhere=True)
    nbytes = sum(size for _, size in (*copied, *on_host))
    fits = budget.host is None or nbytes <= budget.host
    if stage == "lazy" or not fits:
        values.reads_host = bool(on_host)
        # Without a promise the caller waits until they are encoded.
        values.waits = values.waits or (values.reads_host and stage != "lazy")
    else:
        copied += on_host
        if budget.host is not None:
            values.upload_memory = budget.host - nbytes
    values._buffer = buffer
    numbers = [number for number, _ in copied]
    copies = buffer.copy(storages.native.get(numbers))
    sources.put([(number, address) for number, (address, _) in zip(numbers, copies, strict=True)])
