"""Ways to preserve the values that tensors had at the call of a background save: ``stage=``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from . import _core
from ._device import HOST, SCARCE_SCRATCH, current_streams
from ._errors import LimitError, S4Error
from ._sources import check_flag

if TYPE_CHECKING:
    from ._pending import HostBuffer
    from ._storages import StorageWriter

Stage = Literal["auto", "device", "host", "lazy"]

#: Memory of a device that copies leave free: bytes, or this fraction (the denominator) of the
#: device's memory if that is more.
LEAST_FREE, FREE_SHARE = 1 << 30, 10


class Budget(NamedTuple):
    """Limits on the memory that staging takes."""

    #: Bytes of host memory for copies and for data that waits to be uploaded; ``None``: no limit.
    host: int | None = None
    #: Bytes of each device's memory that copies leave free; ``None``: 1 GiB, or a tenth if that is
    #: more.
    device_reserve: int | None = None
    #: Bytes of each device's memory that encoding takes in addition, or copies with ``"host"``.
    scratch: int = 0

    def check(self) -> Budget:
        """Raise `ValueError` for a value that is not a number of bytes."""
        for name, value in (
            ("staging_memory", self.host),
            ("device_reserve", self.device_reserve),
        ):
            if value is not None and (type(value) is not int or value < 0):
                raise ValueError(f"{name}={value!r}: expected a number of bytes")
        return self


def check_stage(stage: str, blocking: bool) -> None:
    """Raise `ValueError` for an unknown stage, or one other than ``"auto"`` in a blocking save, and
    `TypeError` if ``blocking`` is neither true nor false.
    """
    check_flag("blocking", blocking)
    if stage not in get_args(Stage):
        raise ValueError(f'stage={stage!r}: expected "auto", "device", "host" or "lazy"')
    if blocking and stage != "auto":
        raise ValueError(f"stage={stage!r} requires blocking=False")


class StagedValues:
    """The values of a background save, wherever they are read from."""

    def __init__(self, stage: str, storages: StorageWriter, sources: _core.Sources) -> None:
        #: The stage that was used: ``"device"``, ``"host"`` or ``"lazy"``.
        self.stage = stage
        self.sources = sources
        #: The engine that encodes values on devices; ``None``: there are no such values.
        self.engine: _core.CudaEngine | None = None
        #: Whether the call must not return until the native code has finished with its tensors.
        self.waits = False
        #: Whether tensors in host memory are read in place, in the caller's memory.
        self.reads_host = False
        #: Bytes that may wait to be uploaded while values are still needed; ``None``: no limit.
        self.upload_memory: int | None = None
        # Keeps all storages alive, even if the caller drops them.
        self._held: StorageWriter | None = storages
        self._copies: _core.DeviceCopies | None = None
        self._host_copies: _core.HostCopies | None = None
        self._ordinals: list[int] = []
        # Host memory that holds copies, kept until the save ends.
        self._buffer: HostBuffer | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the caller may continue as soon as the copies are queued."""
        return self.stage != "lazy" and not self.waits

    def settle(self) -> None:
        """Called in the background: waits for the copies, and releases the originals."""
        self.wait_copied()
        if self._host_copies is not None:
            self._host_copies.wait()
        if self.is_ready:
            self._held = None

    def wait_copied(self) -> None:
        """Wait for copies on devices to complete."""
        if self._copies is not None:
            self._copies.wait()

    def hold_streams(self) -> None:
        """Make work that is queued on the current streams from now on wait for the copies."""
        if self._copies is None:
            return
        import torch

        for ordinal in sorted(self._ordinals):
            self._copies.hold(ordinal, torch.cuda.current_stream(ordinal).cuda_stream)

    def release(self) -> None:
        """Called when nothing reads the caller's tensors or copies on devices any more."""
        self._held = None
        if self._copies is not None:
            self._copies.free()

    def end(self) -> None:
        """Called when the save has ended."""
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
    """Ensure that the save reads the values as they are now.

    With ``"lazy"`` the caller ensures that, until the save has read them; ``streams`` may then be
    what `streams_behind` returned earlier.

    Raises:
        LimitError: with ``stage="device"``, there is no room on a device.
        S4Error: with ``stage="device"``, there is no engine for the devices.
    """
    ordinals = storages.native.devices()
    if engine is None and stage == "device" and ordinals:
        raise S4Error(
            'stage="device": values on CUDA devices must go through host memory here; use '
            'stage="auto" to copy them there'
        )
    if engine is None:
        streams = {}
    elif stage == "lazy":
        streams = streams_behind(engine, ordinals) if streams is None else streams
    else:
        streams = current_streams(ordinals)
    sources = storages.sources(engine, streams)
    on_devices = sources.device_nbytes() > 0
    copies: _core.DeviceCopies | None = None
    most: int | None = budget.scratch
    if stage in ("auto", "device"):
        copies, most = copy_on_devices(sources, engine, streams, stage, budget), None
        stage = "host" if copies is None and (on_devices or stage == "auto") else "device"
    values = StagedValues(stage, storages, sources)
    if stage == "host" and on_devices:
        values._host_copies = copy_to_host(sources, engine, streams, budget, most)
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
    """For each device, by ordinal, a stream that waits for the work queued so far, and for nothing queued later."""
    return {n: engine.after(n, stream) for n, stream in current_streams(ordinals).items()}


def copy_on_devices(
    sources: _core.Sources,
    engine: _core.CudaEngine | None,
    ordinals: Iterable[int],
    stage: str,
    budget: Budget,
) -> _core.DeviceCopies | None:
    """Copy values on their devices; return ``None`` if there is nothing to copy, or no room."""
    if engine is None or not sources.device_nbytes():
        return None
    try:
        return engine.copy(sources, _leave(engine, ordinals, budget))
    except LimitError as error:
        if stage == "device":
            raise LimitError(
                f'stage="device": {error}; use stage="auto" to copy through host memory instead'
            ) from error
        return None


def copy_to_host(
    sources: _core.Sources,
    engine: _core.CudaEngine | None,
    ordinals: Iterable[int],
    budget: Budget,
    most: int | None,
) -> _core.HostCopies | None:
    """Copy device values to page-locked host memory; return ``None`` if there are none, or no room.

    Values for which devices have room, in up to ``most`` bytes of each, are copied there first, and go to the host in
    the background.
    """
    nbytes = sources.device_nbytes()
    if engine is None or not nbytes or (budget.host is not None and nbytes > budget.host):
        return None
    try:
        leave = _leave(engine, ordinals, budget)
        room = {n: max(0, engine.memory(n)[0] - least) for n, least in leave.items()}
        if most is not None:
            room = {n: min(free, most) for n, free in room.items()}
        return engine.copy_to_host(sources, room)
    except S4Error:  # If the device has another problem, encoding on it will report that.
        return None


def _leave(engine: _core.CudaEngine, ordinals: Iterable[int], budget: Budget) -> dict[int, int]:
    """Bytes of each device's memory that copies leave free.

    Copies do not use memory that PyTorch's allocator holds: the next forward pass needs what is
    unused there at the moment, and a copy in it would make PyTorch allocate more. What the
    allocator once had, and may ask for again, is left free, too.
    """
    leave = {}
    for ordinal in ordinals:
        reserve = budget.device_reserve
        if reserve is None:
            reserve = max(LEAST_FREE, engine.memory(ordinal)[1] // FREE_SHARE)
        leave[ordinal] = reserve + min(budget.scratch, SCARCE_SCRATCH) + _regrowth(ordinal)
    return leave


def _regrowth(ordinal: int) -> int:
    """Bytes that PyTorch's allocator once had on a device and has returned."""
    import torch

    try:
        stats = torch.cuda.memory_stats(ordinal)
    except RuntimeError:  # A custom allocator may have no statistics.
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
    """Copy values that are not read on a device to the buffer. The values ``on_host``, given by
    index and size, may be read in place instead.
    """
    sources = values.sources
    copied = sources.on_host(elsewhere=True)
    nbytes = sum(size for _, size in (*copied, *on_host))
    fits = budget.host is None or nbytes <= budget.host
    if stage == "lazy" or not fits:
        values.reads_host = bool(on_host)
        # Without the promise of "lazy", the caller waits until they are encoded.
        values.waits = values.waits or (values.reads_host and stage != "lazy")
    else:
        copied += on_host
        if budget.host is not None:
            values.upload_memory = budget.host - nbytes
    values._buffer = buffer
    numbers = [number for number, _ in copied]
    copies = buffer.copy(storages.native.get(numbers))
    sources.put([(number, address) for number, (address, _) in zip(numbers, copies, strict=True)])
