"""`load`, `verify` and `inspect`."""

from __future__ import annotations

import json
import logging
import os
import pickle
import time
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from . import _core, _pickled
from ._collection import without_collection
from ._device import Compute
from ._errors import UnsupportedFormatError
from ._progress import Progress, ProgressArgument
from ._report import Recorder
from ._save import require_little_endian
from ._select import select
from ._sources import FileLike, Foreign, open_source, require_s4w
from ._storages import StorageReader
from ._torch import OURS, call_original, require_torch
from ._tree import TreeDecoder

logger = logging.getLogger("s4weights")

_TRUE = ("1", "y", "yes", "true")

#: The arguments of `pickle.Unpickler`.
_PICKLE_ARGUMENTS = frozenset(("fix_imports", "encoding", "errors", "buffers"))


def load(
    f: FileLike,
    map_location: Any = None,
    pickle_module: Any = None,
    *,
    weights_only: bool | None = None,
    mmap: bool | None = None,
    threads: int | None = None,
    device: str = "auto",
    gpu_scratch: int | None = None,
    progress: ProgressArgument = None,
    storage_options: Mapping[str, str] | None = None,
    trusted: bool = False,
    keys: Iterable[str] | None = None,
    **pickle_load_args: Any,
) -> Any:
    """Load an object saved by `save`. Takes the arguments of `torch.load` and some more.

    Files written by `torch.save` and safetensors files are passed to their own readers. `load` may
    be called from several threads at the same time, but not with the same stream.

    Args:
        f: a path, a URL or a readable binary stream.
        map_location: as in `torch.load`: ``None``, a device, a dict or a callable. Tensors for a
            CUDA device are decoded on that device. A callable receives storages in host memory.
        pickle_module: as in `torch.load`; implies ``weights_only=False``.
        weights_only: allow only tensors, plain values and the globals allowed in
            `torch.serialization`. ``None`` means ``True``. ``TORCH_FORCE_WEIGHTS_ONLY_LOAD`` and
            ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD`` are respected.
        mmap: as in `torch.load`, for files written by `torch.save`. ``.s4w`` files must be decoded,
            so for these it only causes a warning.
        threads: number of native threads. ``None`` means one per core.
        device: where to decode tensors for CUDA devices, as in `save`.
        gpu_scratch: as in `save`.
        progress: as in `save`.
        storage_options: as in `save`.
        trusted: whether the file comes from a trusted source. If so, it may use a vendor's closed
            codecs, which preset ``"nvcomp"`` writes and which are decoded on a GPU. Their decoders
            are not safe for files of unknown origin. This has no effect on unpickling.
        keys: parts of the object to load, given as key paths such as ``"model"`` or
            ``"model.layers.0"``. The result contains only these parts, in the dicts that lead to
            them. Nothing else is read.
        pickle_load_args: arguments for the unpickler, such as ``encoding``.

    Raises:
        KeyError: one of ``keys`` does not exist in the file.
        TypeError: an argument is one that neither this function nor the unpickler takes.
        UnsafeLoadError: ``weights_only`` does not allow an object in the file; the error contains
            its key path.
        CorruptDataError: the file is damaged or truncated.
        NotFoundError: the file does not exist.
        UnsupportedFormatError: this version cannot read the file.
        S4Error: any other failure.
    """
    require_torch("load")
    compute = Compute(device, gpu_scratch)
    require_little_endian()
    recorder = Recorder("load", f)
    with recorder.begin("open"):
        source = open_source(f, storage_options, threads, trusted)
    if isinstance(source, Foreign):
        if keys is not None:
            require_s4w(source)
        if source.is_safetensors:
            check_pickle_arguments("load", pickle_module, pickle_load_args)
            return _load_safetensors(source.file, map_location)
        arguments = dict(pickle_load_args, weights_only=weights_only, mmap=mmap)
        return call_original("load", source.file, map_location, pickle_module, **arguments)
    check_pickle_arguments("load", pickle_module, pickle_load_args)
    if mmap:
        warnings.warn(
            "mmap=True: a .s4w file is decoded, not mapped; use load(f, 'meta') or load_into to save memory",
            stacklevel=2,
        )
    return read(
        *(source, compute, map_location, pickle_module, weights_only, progress, keys),
        *(pickle_load_args, recorder),
    )


# After `torch.load = s4weights.load`, this must not call itself.
setattr(load, OURS, True)


def check_pickle_arguments(
    function: str, pickle_module: Any, pickle_load_args: Mapping[str, Any]
) -> None:
    """Raise `TypeError` for arguments that no unpickler takes, such as misspelt names.

    A pickle module of the caller's may take any argument.
    """
    if pickle_module not in (None, pickle):
        return
    for name in pickle_load_args.keys() - _PICKLE_ARGUMENTS:
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def read(
    source: _core.Reader,
    compute: Compute,
    map_location: Any,
    pickle_module: Any,
    weights_only: bool | None,
    progress: ProgressArgument,
    keys: Iterable[str] | None,
    pickle_load_args: dict[str, Any],
    recorder: Recorder,
) -> Any:
    """Read the object of an open file or checkpoint, or only the parts that ``keys`` name."""
    with recorder.watch():
        recorder.look(source, keys is None)
        with recorder.stage("read"):
            pickle_module = choose_unpickler(pickle_module, weights_only, pickle_load_args)
            pickle_load_args.setdefault("encoding", "utf-8")
            start = time.perf_counter()
            infos = without_collection(source.tensors)
            tree, wanted = source.tree(), None
            if keys is not None:
                if source.form() != "tree" or tree is None:
                    raise UnsupportedFormatError(
                        "keys=: the object was saved as a pickle, which can only be loaded as a whole"
                    )
                tree, wanted = select(tree, keys)
            total = sum(info[3] for n, info in enumerate(infos) if wanted is None or n in wanted)
            recorder.raw_bytes = total
            tracker = Progress(progress, total, "load")
            storages = StorageReader(source, infos, map_location, tracker, compute, wanted)
            try:
                obj = build(source, tree, storages, map_location, pickle_module, pickle_load_args)
                tracker.finish()
            finally:
                tracker.close()
            logger.debug("loaded %d tensors in %.3f s", len(storages), time.perf_counter() - start)
            return obj


def verify(
    f: FileLike,
    *,
    threads: int | None = None,
    storage_options: Mapping[str, str] | None = None,
    trusted: bool = False,
) -> dict[str, Any]:
    """Decode a whole ``.s4w`` file and check all checksums. Does not need PyTorch.

    This function may be called from several threads at the same time.

    Returns:
        A report of what was checked.

    Raises:
        CorruptDataError: the file is damaged; the message describes the damage and its location.
        S4Error: any other failure.
    """
    reader = require_s4w(open_source(f, storage_options, threads, trusted))
    report: dict[str, Any] = json.loads(reader.verify())
    return report


def inspect(
    f: FileLike,
    *,
    storage_options: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Describe a ``.s4w`` file: versions, tensors, sizes, metadata. Does not read tensor data.

    This function may be called from several threads at the same time.
    """
    reader = require_s4w(open_source(f, storage_options, None))
    report: dict[str, Any] = json.loads(reader.inspect())
    return report


def get_unsafe_globals(
    f: FileLike, *, storage_options: Mapping[str, str] | None = None
) -> list[str]:
    """Return the classes and functions in a file that ``weights_only=True`` does not allow.

    This is the equivalent of `torch.serialization.get_unsafe_globals_in_checkpoint` for ``.s4w``
    files. It does not load the object.
    """
    source = open_source(f, storage_options, None)
    if isinstance(source, Foreign):
        if source.is_safetensors:
            return []
        require_torch("get_unsafe_globals")
        return list(call_original("get_unsafe_globals_in_checkpoint", source.file))
    if source.form() != "pickle":
        return []
    require_torch("get_unsafe_globals")
    return _pickled.unsafe_globals(source.blob("pickle"))


def choose_unpickler(
    pickle_module: Any, weights_only: bool | None, pickle_load_args: dict[str, Any]
) -> Any:
    """`torch.load`'s rules: the module to unpickle with, or ``None`` for the restricted one."""
    asked = weights_only
    if weights_only is None:
        weights_only = pickle_module is None
    force = os.getenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0").lower() in _TRUE
    force_not = os.getenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0").lower() in _TRUE
    if force and force_not:
        raise RuntimeError(
            "Only one of `TORCH_FORCE_WEIGHTS_ONLY_LOAD` or `TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD` "
            "should be set, but both were set."
        )
    if force:
        weights_only = True
    elif force_not and asked is None:
        warnings.warn(
            "Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD detected, and `weights_only` was "
            "not passed: forcing weights_only=False.",
            UserWarning,
            stacklevel=3,
        )
        weights_only = False
    if not weights_only:
        return pickle if pickle_module is None else pickle_module
    if pickle_module is not None:
        raise RuntimeError("Can not safely load weights when explicit pickle_module is specified")
    if pickle_load_args:
        warnings.warn("pickle_load_args only works if `weights_only=False`.", stacklevel=3)
    return None


def build(
    reader: _core.Reader,
    tree: str | None,
    storages: StorageReader,
    map_location: Any,
    pickle_module: Any,
    pickle_load_args: dict[str, Any],
    stand_ins: _pickled.StandIns | None = None,
) -> Any:
    """The object that a file holds."""
    form = reader.form()
    if form == "pickle":
        stream = reader.blob("pickle")
        return _pickled.load(
            stream, storages, map_location, pickle_module, pickle_load_args, stand_ins
        )
    decoder = TreeDecoder(storages)
    try:
        storages.defer()
        is_tree = form == "tree" and tree is not None
        obj = without_collection(
            lambda: decoder.decode(tree or "") if is_tree else decoder.tensors()
        )
        storages.fill()
    finally:
        storages.close()
    return obj


class Layouts(NamedTuple):
    """The object of a file, with tensors that have no values: they are on the device "meta"."""

    obj: Any
    #: The indices of the storages in the file, by identity.
    numbers: dict[int, int]
    #: Tensors that stand in for others.
    stand_ins: _pickled.StandIns


def layouts_of(reader: _core.Reader, weights_only: bool | None) -> Layouts:
    """Build the object of a file without reading any values."""
    compute, progress = Compute("cpu", None), Progress(None, 0, "load")
    storages = StorageReader(reader, reader.tensors(), "meta", progress, compute)
    pickle_module, stand_ins = choose_unpickler(None, weights_only, {}), _pickled.StandIns()
    arguments = {"encoding": "utf-8"}
    obj = build(reader, reader.tree(), storages, "meta", pickle_module, arguments, stand_ins)
    return Layouts(obj, storages.numbers(), stand_ins)


def _load_safetensors(f: FileLike, map_location: Any) -> Any:
    import safetensors.torch
    import torch

    if map_location is not None and not isinstance(map_location, (str, torch.device)):
        raise RuntimeError(
            "safetensors files support only a device as map_location, not a dict or a callable"
        )
    device = "cpu" if map_location is None else str(map_location)
    if isinstance(f, (str, os.PathLike)):
        return safetensors.torch.load_file(os.fspath(f), device=device)
    tensors = safetensors.torch.load(f.read())
    return {name: tensor.to(device) for name, tensor in tensors.items()}
