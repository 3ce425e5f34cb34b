"""The native module. Addresses are those of host memory that the caller keeps alive."""

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
"""Called now and then with the bytes that a call has done; what it raises cancels the call."""

def copy_memory(items: Sequence[tuple[int, int, int]], threads: int | None) -> None:
    """Copies host memory on several threads: for each item the address to copy to, the address to
    copy from, and bytes.
    """

def dtypes() -> list[str]:
    """The names of the dtypes that the format has: PyTorch's, without ``torch.``."""

def close_log() -> None:
    """Passes on what is still to be logged, and logs nothing later: for when the process ends."""

def reset_log() -> None:
    """Forgets what the parent process would log: for the child after a fork."""

def panic_on_purpose() -> None:
    """Panics in native code: lets tests see what becomes of that."""

def freeze(obj: object) -> tuple[object, list[int]] | None:
    """A copy of an object in which nothing but tensors can change, and the numbers of the CUDA devices that they
    are on; ``None``: it holds what cannot be copied like that.
    """

def give_way() -> None:
    """Lowers the priority of all native work that this thread starts from now on (on Linux)."""

def is_s4w(head: bytes) -> bool:
    """Whether bytes start like a ``.s4w`` file."""

def ends_s4w(end: bytes) -> bool:
    """Whether bytes end like a ``.s4w`` file."""

def first_len(data: bytes, start: int) -> int | None:
    """Length of the ``.s4w`` file that begins at a place in some bytes, whatever follows it; ``None`` if
    it has no whole footer.
    """

def look_at(path: str) -> tuple[bytes, bool] | None:
    """The first bytes of a file, and whether these or its last ones are those of a ``.s4w`` file;
    ``None`` if it cannot be looked at, or is no ordinary file.
    """

def is_whole(tail: bytes, size: int) -> bool:
    """Whether the last bytes of a file are those of one ``.s4w`` file of its size."""

def is_url(text: str) -> bool:
    """Whether a text names an object store or a ``file:`` URL rather than a path."""

def command_line(arguments: Sequence[str]) -> int:
    """Runs ``s4w`` with arguments; gives its exit code."""

def write_tree(obj: object, number: Callable[[Any, str], int]) -> str | None:
    """The tree of an object as JSON; ``None`` if it cannot be one. ``number`` is asked once for each object
    that is neither a plain value nor a container, with its path as a unique name, for the number of a
    tensor of the file.
    """

class Storages:
    """The storages of an object's tensors, numbered as they are met, each the tensor of a file that it
    becomes. It keeps them alive.
    """

    def __len__(self) -> int: ...
    def nbytes(self) -> int:
        """Bytes of all."""

    def tree(self, obj: object, patiently: bool = False) -> str | None:
        """The object's tree as JSON, with its tensors' storages numbered; ``None`` if it cannot be one: then
        this object is to be thrown away. ``patiently``: other threads get Python's lock meanwhile, and do not
        change the object. Raises `S4Error` for tensors whose storage was freed.
        """

    def roles(self, obj: object) -> str | None:
        """What tensors are to an optimizer, as JSON, if the object has one; weights and the optimizer's
        state are in different groups from then on.
        """

    def find(self, storage: Any) -> int | None:
        """The number of a storage, if it has been met."""

    def add(self, storage: Any, name: str, dtype: Any, shape: Sequence[int] | None) -> int:
        """Numbers a storage that has not been met; without a shape it is one dimension of all there is."""

    def get(self, numbers: Sequence[int]) -> list[Any]:
        """Storages by their numbers."""

    def devices(self) -> list[int]:
        """The numbers of the CUDA devices that have values."""

    def sources(self, streams: Mapping[int, int]) -> Sources:
        """Where the values are. ``streams``: of the CUDA devices on which values are to be read, by number,
        the stream to read them on.
        """

class Sources:
    """Where values are that are to be written. The caller keeps them alive."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int) -> PlacedSource: ...
    def nbytes(self, first: int = ..., end: int = ...) -> int:
        """Bytes of those from ``first`` to before ``end``."""

    def on_devices(self) -> list[tuple[int, int, Where]]:
        """Address, bytes and place of values on CUDA devices."""

    def device_nbytes(self) -> int:
        """Bytes on CUDA devices."""

    def on_host(self, elsewhere: bool = ...) -> list[tuple[int, int]]:
        """Numbers and bytes of values in host memory; with ``elsewhere``, of those that must be copied there
        first. Without those of no bytes.
        """

    def put(self, copies: Sequence[tuple[int, int]]) -> None:
        """Says that values were copied to host memory: number and address of each."""

    def move_to(self, places: Sequence[tuple[int, Where]]) -> None:
        """Says that all values on CUDA devices were copied: address and place of each copy, in order."""

class Compressed:
    """A compressed tensor in memory; ``len`` is its size in bytes."""

    def __len__(self) -> int: ...

class CudaEngine:
    """Encodes and decodes on CUDA devices, with so many bytes of memory on each while it works.

    Raises `S4Error` where there is no CUDA that can be used. It keeps page-locked host memory: ``frames``
    bytes at most for what it encoded or copied there, besides its ring.
    """

    def __new__(cls, scratch: int, frames: int) -> CudaEngine: ...
    def open(self, ordinal: int) -> None:
        """Opens a device, takes the scratch memory and gives it back."""

    def copy(self, sources: Sources, leave: Mapping[int, int]) -> DeviceCopies:
        """Queues copies of values on devices, on the streams that they are used on: after what was queued
        there before, and before all that is queued later.

        ``leave``: bytes of each device's memory, by its number, that must stay free. Raises `LimitError`
        if there is no room for the copies besides.
        """

    def copy_to_host(self, sources: Sources) -> HostCopies:
        """Copies values on devices to page-locked memory of the host, behind what was queued on their streams
        before. The copies are made when it returns.

        Raises `LimitError` if ``frames`` leave no room for them.
        """

    def memory(self, ordinal: int) -> tuple[int, int]:
        """Free and total bytes of a device's memory, as the driver counts them."""

    def after(self, ordinal: int, stream: int) -> int:
        """The handle of a stream of the engine's own that comes after what was queued on another until
        now.
        """

    def chunks(self) -> tuple[int, int, int]:
        """Chunks done by the kernels, by the CPU, and by the CPU after the kernels refused them."""

    def frame_memory(self) -> tuple[int, int, int, int]:
        """Page-locked memory for encoded frames and copies: bytes that were taken from the system, that are
        idle, and that may be taken at most; and how often the system was asked for some.
        """

    def limit_frame_memory(self, bytes: int) -> None:
        """Sets the most page-locked memory for encoded frames; what is idle beyond it goes back at once."""

    def grow_frame_memory(self, bytes: int) -> bool:
        """Takes one more piece of it, unless what was taken has room for so many bytes, or may not be more;
        returns whether it did.
        """

    def trim_frame_memory(self) -> None:
        """Gives page-locked memory for encoded frames that is idle back to the system."""

    def scratch_high_water(self, ordinal: int) -> int:
        """The most device memory, in bytes, that was held at once."""

class HostCopies:
    """Copies of tensors of CUDA devices in page-locked memory of the host."""

    def addresses(self) -> list[int]:
        """The address of each, in the order of the tensors."""

    def nbytes(self) -> int:
        """Bytes of host memory that they take."""

    def free(self) -> None:
        """Keeps the memory for the next copies. What reads these must be done."""

class DeviceCopies:
    """Copies of tensors in the memory of CUDA devices, in memory that the driver gave."""

    def places(self) -> list[tuple[int, Where]]:
        """Address and place of each, in the order of the tensors; their stream comes after the copies."""

    def nbytes(self) -> int:
        """Bytes of device memory that they take."""

    def wait(self) -> None:
        """Waits until the copies are made. Does nothing once they are freed."""

    def hold(self, ordinal: int, stream: int) -> None:
        """Has what is queued on a stream from now on wait for the copies."""

    def free(self) -> None:
        """Gives the memory back to the devices. What reads the copies must be done."""

class TensorCodec:
    """Compresses and decompresses tensors in memory: the codec without a file around it."""

    def __new__(cls, preset: str, threads: int | None, simd: str | None) -> TensorCodec: ...
    def compress(self, address: int, nbytes: int, dtype: str, shape: tuple[int, ...]) -> Compressed:
        """Compresses a tensor, whose memory is read during the call."""

    def decompress(self, tensor: Compressed, address: int, nbytes: int) -> None:
        """Decompresses into memory of the tensor's size."""

class Store:
    """A checkpoint store. Calls may come from several threads. What is returned is JSON."""

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
        """Saves a checkpoint; ``roles`` and ``tree`` are JSON. The tensors' memory is read during the
        call, that of CUDA devices, which need an engine, until ``staged`` is called. With
        ``host_changes`` that is true of all tensors. ``staging_memory``: bytes that may wait to be
        uploaded until then; ``None``: all.
        """

    def list(self) -> str:
        """All listed checkpoints, from the oldest to the newest."""

    def latest(self) -> str | None:
        """The newest checkpoint."""

    def open(self, id: str) -> Reader:
        """Opens a checkpoint."""

    def open_alone(self, id: str) -> Reader:
        """Opens a checkpoint without what it is a delta of."""

    def stored_bytes(self, id: str) -> tuple[bytes, Sequence[bytes]]:
        """The index of a checkpoint, and its objects, each compared with its hash."""

    def pin(self, id: str, pinned: bool) -> None:
        """Protects a checkpoint, or ends that."""

    def retire(self, ids: Sequence[str], reason: str) -> int:
        """Takes checkpoints off the list."""

    def unretire(self, ids: Sequence[str]) -> str:
        """Lists retired checkpoints again."""

    def apply_retention(
        self,
        keep_last: int | None,
        keep_every: int | None,
        best: Sequence[tuple[str, int, bool]],
        protect: Sequence[str],
    ) -> Sequence[str]:
        """Retires what a policy does not keep."""

    def rebase(self, id: str, callback: Progress | None) -> str:
        """Rewrites a checkpoint as a base."""

    def sweep(self, grace_s: float, exclusive: bool, dry_run: bool) -> str:
        """Deletes what nothing needs."""

    def check(self, read_data: bool, only: Sequence[str]) -> str:
        """Checks checkpoints; all if none is named."""

    def repo(self) -> str:
        """What the store says of itself."""

def begin_parts(store: Store, raw: int, base: bool) -> str:
    """Begins a checkpoint of several processes, of ``raw`` bytes of tensors: what each is told."""

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
    """Stores a rank's tensors: the part, for the coordinator, and its bytes before and after. The last
    three are as for `Store.save`.
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
    """Lists a checkpoint whose parts are stored, in the order of ranks. Returns what `Store.save` does."""

def give_up_parts(store: Store, part_of: str) -> None:
    """Deletes what was stored of a checkpoint that was begun."""

class Writer:
    """Writes one file, to one of a path, a URL and a stream with a ``write`` method.

    ``roles`` is the role table as JSON: planning may depend on it. The writer cannot be used any more
    after `finish`, `abort` or an error.
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
        """Encodes tensors. Their memory is read during the call. ``groups``: none, or one byte for
        each tensor.
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
        """Encodes the values from ``first`` to before ``end``; those on CUDA devices need an engine. Nothing
        reads their memory any more when this returns. ``ahead``: bytes of encoded values of devices that
        may wait, in page-locked memory, to be written after that.
        """

    def finish(
        self,
        tree: str | None,
        blobs: Mapping[str, bytes],
        metadata: Mapping[str, str],
    ) -> str:
        """Makes the file visible and returns, as JSON, what was written."""

    def abort(self) -> None:
        """Leaves nothing behind. Does nothing after `finish`."""

class Reader:
    """Reads one file, from one of a path, a URL and bytes. Calls may come from several threads."""

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
        """``start`` and ``end``: where in the bytes the file lies."""

    @staticmethod
    def in_memory(index: bytes, objects: Sequence[bytes], threads: int | None) -> Reader:
        """Opens a checkpoint of a store: what `Store.stored_bytes` gave."""

    def set_parent(self, parent: Reader) -> None:
        """Gives it what it is a delta of. Raises `CorruptDataError` if that is another checkpoint."""

    def digests(self) -> tuple[str, str | None]:
        """The hash that names the checkpoint, and that of the one that it is a delta of."""

    def tensors(self) -> list[TensorInfo]:
        """The tensors, in the order in which they were written."""

    def form(self) -> str:
        """How the saved object is described: ``tensors``, ``tree`` or ``pickle``."""

    def tree(self) -> str | None:
        """The saved object as JSON."""

    def blob(self, name: str) -> bytes:
        """A named byte string."""

    def read_into(
        self,
        requests: Sequence[tuple[int, int, int]],
        progress: Progress | None,
        new: bool = ...,
    ) -> None:
        """Decodes tensors into memory: number, address, bytes. ``new``: nobody has used it yet."""

    def read_view(
        self,
        number: int,
        array: tuple[int, int, Sequence[int]],
        part: Sequence[tuple[int, int]],
        memory: tuple[int, int],
    ) -> None:
        """Decodes part of an array that lies within a tensor, and no other chunks: the array's first
        byte, bytes of an element and shape; the part's first index and end in each dimension;
        address and bytes.
        """

    def metadata(self) -> dict[str, str]:
        """The free text that the file keeps."""

    def read_into_device(
        self,
        engine: CudaEngine,
        requests: Sequence[PlacedRequest],
        progress: Progress | None,
    ) -> None:
        """As `read_into`, into device memory. All of it is there when this returns."""

    def apply_into(
        self, requests: Sequence[tuple[int, int, int]], progress: Progress | None
    ) -> None:
        """As `read_into`, of memory that holds the values of what the checkpoint is a delta of."""

    def apply_into_device(
        self,
        engine: CudaEngine,
        requests: Sequence[PlacedRequest],
        progress: Progress | None,
    ) -> list[int]:
        """As `apply_into`, of device memory. Gives the places of the requests that are to be read, what
        they hold being unspecified.
        """

    def inspect(self) -> str:
        """What the file says of itself, as JSON."""

    def verify(self) -> str:
        """Reads and compares everything; returns, as JSON, what was checked."""
