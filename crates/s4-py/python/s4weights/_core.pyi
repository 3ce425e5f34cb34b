"""The native module. The caller must keep the memory at all passed addresses alive."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

__version__: str

TensorSource: TypeAlias = tuple[str, str, tuple[int, ...], int, int]
"""Name, dtype, shape, address, bytes."""

Where: TypeAlias = tuple[int, int]
"""Number of the CUDA device, or -1 for the host; handle of its current stream, or 0."""

PlacedSource: TypeAlias = tuple[str, str, tuple[int, ...], int, int, Where]
"""Name, dtype, shape, address, bytes, where."""

PlacedRequest: TypeAlias = tuple[int, int, int, Where]
"""Number, address, bytes, where."""

TensorInfo: TypeAlias = tuple[str, str, tuple[int, ...], int]
"""Name, dtype, shape, bytes."""

Progress: TypeAlias = Callable[[int], object]
"""Called from time to time with the number of bytes done. If it raises an exception, the call is
cancelled.
"""

def copy_memory(items: Sequence[tuple[int, int, int]], threads: int | None) -> None:
    """Copy host memory on several threads. Each item is a destination address, a source address
    and a size in bytes. ``threads`` defaults to the number of cores.
    """

def dtypes() -> list[str]:
    """The names of the dtypes that the format supports: PyTorch's names, without ``torch.``."""

def close_log() -> None:
    """Called before the interpreter exits: delivers what is queued, and starts no more threads."""

def reset_log() -> None:
    """Called in the child after a fork: drops log records that are the parent's to deliver."""

def panic_on_purpose() -> None:
    """Panic in native code, so that tests can check how a panic is reported."""

def freeze(obj: object) -> tuple[object, list[int]] | None:
    """A copy of an object in which only tensors can still change, and the ordinals of the CUDA
    devices that they are on, or ``None`` if it holds anything that cannot be copied that way.
    """

def nesting() -> int:
    """Return the number of native calls of this thread whose progress functions or signal handlers
    are running.
    """

def give_way() -> None:
    """Lower the priority of all native work that this thread starts from now on (on Linux)."""

def is_s4w(head: bytes) -> bool:
    """Whether bytes start like a ``.s4w`` file."""

def ends_s4w(end: bytes) -> bool:
    """Whether bytes end like a ``.s4w`` file."""

def first_len(data: bytes, start: int) -> int | None:
    """Length of the ``.s4w`` file that begins at offset ``start`` of ``data``, whatever follows
    it, or ``None`` if it has no complete footer.
    """

def look_at(path: str) -> tuple[bytes, bool] | None:
    """The first bytes of a file, and whether its first or last bytes identify it as a ``.s4w``
    file, or ``None`` if it cannot be read, or is not a regular file.
    """

def is_whole(tail: bytes, size: int) -> bool:
    """Whether ``tail`` ends a single ``.s4w`` file of exactly ``size`` bytes."""

def is_url(text: str) -> bool:
    """Whether a text is the URL of an object store or a ``file:`` URL rather than a path."""

def path_of_url(url: str) -> str | None:
    """The path on this machine that a ``file:`` URL names, or ``None`` for other URLs."""

def command_line(arguments: Sequence[str], signals: bool) -> int:
    """Run ``s4w`` with these arguments; return its exit code. If ``signals``, the command stops on
    SIGINT, SIGTERM and SIGHUP, and removes partial output.
    """

def write_tree(obj: object, number: Callable[[Any, str], int]) -> str | None:
    """The tree of an object as JSON, or ``None`` if the object does not fit into a tree. ``number``
    is called once for each object that is neither a plain value nor a container, with the object
    and its path as a unique name; it returns the index of a tensor of the file.
    """

class Storages:
    """The storages of an object's tensors, in the order in which they are found. The index of a
    storage is that of the tensor that it becomes in a file. Keeps the storages alive.
    """

    def __len__(self) -> int: ...
    def nbytes(self) -> int:
        """Bytes of all storages."""

    def tree(self, obj: object, yields_gil: bool = False) -> str | None:
        """The object's tree as JSON; adds the storages of its tensors. ``None`` if the object does
        not fit into a tree; this `Storages` must then be discarded. ``yields_gil``: other threads
        get the GIL from time to time, and must not change the object meanwhile. Raises `S4Error`
        for tensors whose storage was freed.
        """

    def roles(self, obj: object) -> str | None:
        """Put weights and the optimizer's state into different groups. Return the role table
        (what each tensor is to the optimizer) as JSON, if there is one.
        """

    def find(self, storage: Any) -> int | None:
        """The index of a storage, or ``None`` if it was not added."""

    def add(self, storage: Any, name: str, dtype: Any, shape: Sequence[int] | None) -> int:
        """Add a new storage and return its index. Without a shape it is stored as one dimension
        that covers the whole storage.
        """

    def get(self, numbers: Sequence[int]) -> list[Any]:
        """The storages with these indices."""

    def devices(self) -> list[int]:
        """The ordinals of the CUDA devices that hold values."""

    def sources(self, streams: Mapping[int, int]) -> Sources:
        """The places of the values. ``streams`` has the CUDA devices on which values will be read, by
        ordinal, and for each the stream to read them on. Values on other devices must be copied
        to the host first.
        """

class Sources:
    """Values to be written, wherever they are. The caller keeps their memory alive."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int) -> PlacedSource: ...
    def nbytes(self, first: int = ..., end: int = ...) -> int:
        """Bytes of the values with indices from ``first`` up to, not including, ``end``."""

    def on_devices(self) -> list[tuple[int, int, Where]]:
        """Address, bytes and place of values on CUDA devices."""

    def device_nbytes(self) -> int:
        """Bytes on CUDA devices."""

    def on_host(self, elsewhere: bool = ...) -> list[tuple[int, int]]:
        """Indices and sizes of the values in host memory or, with ``elsewhere``, of those that must
        be copied there first. Empty values are left out.
        """

    def put(self, copies: Sequence[tuple[int, int]]) -> None:
        """Record that values were copied to host memory: index and new address of each."""

    def move_to(self, places: Sequence[tuple[int, Where]]) -> None:
        """Record that all values on CUDA devices were copied: address and place of each copy, in
        the order of `on_devices`.
        """

class Compressed:
    """A compressed tensor in memory; ``len`` is its size in bytes."""

    def __len__(self) -> int: ...

class CudaEngine:
    """Encodes and decodes on CUDA devices, with up to ``scratch`` bytes of memory on each while it
    works.

    Raises `S4Error` if CUDA cannot be used. It keeps page-locked host memory: its ring, and at most
    ``frames`` bytes for encoded frames and copies.
    """

    def __new__(cls, scratch: int, frames: int) -> CudaEngine: ...
    def open(self, ordinal: int) -> None:
        """Open a device, and allocate and free its scratch memory, so that problems show up now."""

    def copy(self, sources: Sources, leave: Mapping[int, int]) -> DeviceCopies:
        """Queue copies of the values on devices, on the streams that they are used on: after the
        work that is queued there already, and before any that is queued later.

        ``leave``: bytes of memory that must stay free on each device, by ordinal. Raises
        `LimitError` if the copies do not fit.
        """

    def copy_to_host(self, sources: Sources, room: Mapping[int, int]) -> HostCopies:
        """Copy the values on devices to page-locked host memory, after the work that is queued on
        their streams. When this returns, the values may be changed.

        ``room``: bytes of memory that copies may take on each device, by ordinal, until they have
        arrived on the host. Raises `LimitError` if the limit ``frames`` leaves no room for them.
        """

    def memory(self, ordinal: int) -> tuple[int, int]:
        """Free and total bytes of a device's memory, as the driver counts them."""

    def after(self, ordinal: int, stream: int) -> int:
        """The handle of a stream of the engine's own that waits for the work queued on ``stream``
        so far.
        """

    def chunks(self) -> tuple[int, int, int]:
        """Chunks done by the kernels, by the CPU, and by the CPU after the kernels refused them."""

    def frame_memory(self) -> tuple[int, int, int, int]:
        """Page-locked memory for encoded frames and copies: bytes taken from the system, the idle
        part of them, and the limit; and how many times memory was taken.
        """

    def limit_frame_memory(self, bytes: int) -> None:
        """Limit the page-locked memory for encoded frames; idle memory beyond that is returned to
        the system immediately.
        """

    def grow_frame_memory(self, bytes: int) -> bool:
        """Allocate one more piece of that memory from the system, unless there is already room for
        ``bytes`` of frames or the limit is reached. Return whether memory was allocated.
        """

    def trim_frame_memory(self) -> None:
        """Return idle page-locked memory for encoded frames to the system."""

    def scratch_high_water(self, ordinal: int) -> int:
        """The most memory, in bytes, that the engine held on a device at one time."""

class HostCopies:
    """Copies of CUDA tensors in page-locked host memory."""

    def addresses(self) -> list[int]:
        """The address of each copy, in the order of the tensors."""

    def wait(self) -> None:
        """Wait until all copies have arrived, and free the memory that they took on devices."""

    def nbytes(self) -> int:
        """Bytes of host memory that the copies take."""

    def free(self) -> None:
        """Release the memory for later copies. These copies must no longer be in use."""

class DeviceCopies:
    """Copies of tensors on CUDA devices, in memory allocated from the driver."""

    def places(self) -> list[tuple[int, Where]]:
        """Address and place of each copy, in the order of the tensors. Work on the stream of a
        place runs after the copy.
        """

    def nbytes(self) -> int:
        """Bytes of device memory that the copies take."""

    def wait(self) -> None:
        """Wait until the copies are complete. Does nothing once they are freed."""

    def hold(self, ordinal: int, stream: int) -> None:
        """Make work that is queued on a stream from now on wait for the copies."""

    def free(self) -> None:
        """Free the device memory. The copies must no longer be in use."""

class TensorCodec:
    """Compresses and decompresses tensors in memory: the codec without a file around it."""

    def __new__(cls, preset: str, threads: int | None, simd: str | None) -> TensorCodec: ...
    def compress(self, address: int, nbytes: int, dtype: str, shape: tuple[int, ...]) -> Compressed:
        """Compress a tensor. Its memory is read during the call."""

    def decompress(self, tensor: Compressed, address: int, nbytes: int) -> None:
        """Decompress into memory of exactly the tensor's size."""

class Store:
    """A checkpoint store. Calls may come from several threads. Strings returned are JSON."""

    def __new__(
        cls,
        url: str,
        mode: str,
        *,
        storage_options: Mapping[str, str],
        preset: str,
        threads: int | None,
        max_chain: int | None,
        max_hops: int | None,
        parent_memory: int | None,
        bandwidth: int | None,
        allow_network_fs: bool,
        timeout: float | None,
        writers: str,
    ) -> Store: ...
    def save(
        self,
        step: int,
        sources: Sources,
        *,
        roles: str | None,
        tree: str | None,
        blobs: Mapping[str, bytes],
        metadata: Mapping[str, str],
        metrics: Mapping[str, float],
        tags: Mapping[str, str],
        base: bool,
        callback: Progress | None,
        engine: CudaEngine | None,
        staged: Callable[[], object] | None,
        host_changes: bool,
        staging_memory: int | None,
    ) -> str:
        """Save a checkpoint; ``roles`` and ``tree`` are JSON. Tensors on CUDA devices need an
        engine; their memory is read until ``staged`` is called, that of host tensors until the
        call returns. With ``host_changes``, host tensors are also read only until ``staged`` is
        called. ``staging_memory``: bytes that may wait to be uploaded until then. ``None`` means no
        limit. Return the entry and the report.
        """

    def list(self) -> str:
        """All listed checkpoints, from the oldest to the newest."""

    def latest(self) -> str | None:
        """The newest checkpoint."""

    def open(self, id: str) -> Reader:
        """Open a checkpoint."""

    def open_alone(self, id: str) -> Reader:
        """Open a checkpoint without its parent."""

    def stored_bytes(self, id: str) -> tuple[bytes, Sequence[bytes]]:
        """The index of a checkpoint and its objects, each verified against its hash."""

    def pin(self, id: str, pinned: bool) -> None:
        """Pin a checkpoint, or unpin it."""

    def retire(self, ids: Sequence[str], reason: str) -> int:
        """Take checkpoints off the list."""

    def unretire(self, ids: Sequence[str]) -> str:
        """List retired checkpoints again."""

    def apply_retention(
        self,
        keep_last: int | None,
        keep_every: int | None,
        best: Sequence[tuple[str, int, bool]],
        protect: Sequence[str],
    ) -> Sequence[str]:
        """Retire the checkpoints that a policy does not keep; return their ids."""

    def rebase(self, id: str, callback: Progress | None) -> str:
        """Rewrite a checkpoint as a base."""

    def sweep(self, grace_s: float, exclusive: bool, dry_run: bool) -> str:
        """Delete data that no listed checkpoint needs."""

    def check(self, read_data: bool, only: Sequence[str]) -> str:
        """Check some checkpoints, or all if ``only`` is empty."""

    def repo(self) -> str:
        """The contents of the store's ``repo.json``."""

def begin_parts(store: Store, raw: int, tensors: Sequence[int], base: bool) -> list[str]:
    """Begin a checkpoint that several processes store together. ``raw``: approximate size of its
    tensors in bytes; ``tensors``: approximate number of tensors of each rank. Return the
    ``part_of`` of each rank.
    """

def save_part(
    store: Store,
    part_of: str,
    rank: int,
    tensors: Sequence[PlacedSource],
    *,
    groups: bytes,
    callback: Progress | None,
    engine: CudaEngine | None,
    staged: Callable[[], object] | None,
    host_changes: bool,
    staging_memory: int | None,
) -> tuple[bytes, int, int]:
    """Store a rank's tensors. Return the part, for the coordinator, and its bytes before and
    after compression. ``staged``, ``host_changes`` and ``staging_memory`` are as for `Store.save`.
    """

def publish_parts(
    store: Store,
    part_of: str,
    step: int,
    parts: Sequence[bytes | None],
    *,
    blobs: Mapping[str, bytes],
    metadata: Mapping[str, str],
    metrics: Mapping[str, float],
    tags: Mapping[str, str],
) -> str:
    """List a checkpoint whose parts are stored. ``parts``: the results of `save_part`, in the order
    of ranks. Return the entry and the report, like `Store.save`.
    """

def give_up_parts(store: Store, part_of: str) -> None:
    """Abandon a checkpoint and delete the parts stored so far."""

class Writer:
    """Writes one file. Exactly one of path, URL and stream must be given; a stream needs a
    ``write`` method.

    ``roles`` is the role table as JSON: planning may depend on it. The writer cannot be used after
    `finish`, `abort` or an error.
    """

    def __new__(
        cls,
        path: str | None,
        url: str | None,
        stream: Any,
        preset: str,
        threads: int | None,
        storage_options: Mapping[str, str],
        roles: str | None = ...,
    ) -> Writer: ...
    def write(
        self, tensors: Sequence[TensorSource], groups: bytes, progress: Progress | None
    ) -> None:
        """Encode tensors. Their memory is read during the call. ``groups``: the group of each
        tensor, one byte each; empty: all are in the first group.
        """

    def write_sources(
        self,
        engine: CudaEngine | None,
        sources: Sources,
        first: int,
        end: int,
        progress: Progress | None,
        ahead: int | None = ...,
    ) -> None:
        """Encode the values with indices from ``first`` up to, not including, ``end``; those on
        CUDA devices need an engine. Their memory is not read after this returns. ``ahead``: bytes
        of encoded device values that may then still wait in page-locked memory to be written.
        """

    def finish(
        self,
        tree: str | None,
        blobs: Mapping[str, bytes],
        metadata: Mapping[str, str],
    ) -> str:
        """Make the file visible. Return a report on the written data, as JSON."""

    def abort(self) -> None:
        """Remove all written data. Does nothing after `finish`."""

class Reader:
    """Reads one file. Exactly one of path, URL and bytes must be given. Several threads may call it
    at the same time.
    """

    def __new__(
        cls,
        path: str | None,
        url: str | None,
        data: bytes | None,
        threads: int | None,
        storage_options: Mapping[str, str],
        trusted: bool = ...,
        start: int = ...,
        end: int | None = ...,
    ) -> Reader:
        """``start`` and ``end``: the range of ``data`` that is the file."""

    @staticmethod
    def in_memory(index: bytes, objects: Sequence[bytes], threads: int | None) -> Reader:
        """Open a checkpoint of a store from what `Store.stored_bytes` returned."""

    def set_parent(self, parent: Reader) -> None:
        """Set the parent. Raises `CorruptDataError` if it is not the checkpoint's parent."""

    def digests(self) -> tuple[str, str | None]:
        """The hash that identifies the checkpoint, and that of its parent, in hexadecimal."""

    def tensors(self) -> list[TensorInfo]:
        """The tensors, in the order in which they were written."""

    def form(self) -> str:
        """The form in which the saved object is stored: ``tensors``, ``tree`` or ``pickle``."""

    def tree(self) -> str | None:
        """The tree of the saved object, as JSON, if there is one."""

    def blob(self, name: str) -> bytes:
        """A named byte string."""

    def read_into(
        self,
        requests: Sequence[tuple[int, int, int]],
        progress: Progress | None,
        new: bool = ...,
    ) -> None:
        """Decode tensors into memory: tensor index, address, bytes. ``new``: the memory was not
        used before, so large pages are worth asking for.
        """

    def read_together(self) -> list[int] | None:
        """The indices of the tensors that are copies of others, and of those others: read by one
        call, each is decoded once. ``None`` means this holds for all tensors, as in a delta, or there is
        little to gain from reading some while others are not ready.
        """

    def read_view(
        self,
        number: int,
        array: tuple[int, int, Sequence[int]],
        part: Sequence[tuple[int, int]],
        memory: tuple[int, int],
    ) -> None:
        """Decode part of an array that lies within a tensor, and only the chunks that it needs.
        ``array``: its first byte, bytes per element and shape; ``part``: start and end in each
        dimension; ``memory``: address and bytes of the destination.
        """

    def metadata(self) -> dict[str, str]:
        """Return the metadata stored in the file."""

    def read_into_device(
        self,
        engine: CudaEngine,
        requests: Sequence[PlacedRequest],
        progress: Progress | None,
    ) -> None:
        """Like `read_into`, into device memory. All values are in place when this returns."""

    def apply_into(
        self, requests: Sequence[tuple[int, int, int]], progress: Progress | None
    ) -> None:
        """Like `read_into`, but into memory that holds the parent's values: decoding uses them."""

    def apply_into_device(
        self,
        engine: CudaEngine,
        requests: Sequence[PlacedRequest],
        progress: Progress | None,
    ) -> list[int]:
        """Like `apply_into`, for device memory. Return the positions of the requests that could not
        be applied: their memory holds unspecified values and must be filled by reading.
        """

    def inspect(self) -> str:
        """A description of the file (versions, tensors, sizes, metadata), as JSON."""

    def verify(self) -> str:
        """Read all data and check all checksums. Return a report as JSON."""
