"""Orbax: saves items of a ``CheckpointManager`` as ``.s4w`` files, for JAX.

::

    from s4weights.adapters.orbax import S4Restore, S4Save

    manager.save(step, args=S4Save(state))
    state = manager.restore(step, args=S4Restore(state))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .._errors import MismatchError, UnsupportedFormatError
from .._load import load
from .._save import save
from ._common import require

require("orbax", "0.11", "orbax-checkpoint")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402

from ._arrays import to_numpy, to_torch  # noqa: E402

__all__ = ["S4Handler", "S4Restore", "S4Save"]

_FILE = "tree.s4w"

#: Orbax's default for the process that commits.
_PRIMARY = 0


class S4Handler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]
    """Keeps a PyTree in one ``.s4w`` file. Orbax handles steps, retention, commits and background
    saves. One process must be able to access all arrays, however they are sharded. With several
    processes, the first one writes.

    Args:
        options: arguments of `s4weights.save`, such as ``preset``.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options

    async def async_save(self, directory: Any, args: S4Save) -> Sequence[Any]:
        """Called by Orbax: copies the tree to the host, and writes it in the background."""
        if (packed := _pack_here(args.item)) is None:
            return []
        done = ocp.future.CommitFutureAwaitingContractedSignals(
            self._write(packed, directory), name="s4weights_save"
        )
        return [done]

    async def _write(self, packed: dict[str, Any], directory: Any) -> None:
        save(packed, str(directory / _FILE), **self._options)

    def save(self, directory: Any, args: S4Save) -> None:
        """Called by Orbax: writes a tree."""
        if (packed := _pack_here(args.item)) is not None:
            save(packed, str(directory / _FILE), **self._options)

    def restore(self, directory: Any, args: S4Restore | None = None) -> Any:
        """Called by Orbax: reads a tree.

        Raises:
            MismatchError: its structure, shapes or dtypes differ from those of ``args``.
        """
        packed = load(str(directory / _FILE), "cpu")
        return _unpack(packed, None if args is None else args.item, str(directory))


@ocp.args.register_with_handler(S4Handler, for_save=True)
@dataclasses.dataclass
class S4Save(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """The tree to save.

    Attributes:
        item: a PyTree of JAX and NumPy arrays of numbers, random keys, numbers, strings and
            ``None``.

    Raises:
        UnsupportedFormatError: it has other leaves or, with several processes, arrays that may
            differ between them. This is raised before Orbax starts to save: an error in the middle
            of a save would leave a thread of Orbax running, and the interpreter would wait for it
            at exit.
    """

    item: Any

    def __post_init__(self) -> None:
        for path, leaf in jax.tree_util.tree_flatten_with_path(self.item)[0]:
            _check_leaf(leaf, path)


@ocp.args.register_with_handler(S4Handler, for_restore=True)
@dataclasses.dataclass
class S4Restore(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """The tree to restore.

    Attributes:
        item: a PyTree with the saved structure. Its arrays, or ``jax.ShapeDtypeStruct`` objects in
            their place, determine where to put each array. With ``None``, the result is a dict from
            each leaf's path (``"['params']['w']"``) to its value, with arrays on the default
            device.
    """

    item: Any = None


def _pack_here(tree: Any) -> dict[str, Any] | None:
    """The tree, packed, in the process that writes it: all of them have the same one, and one file."""
    return _pack(tree) if jax.process_index() == _PRIMARY else None


def _pack(tree: Any) -> dict[str, Any]:
    """The leaves by their paths, as plain values and tensors in host memory."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): _pack_leaf(leaf, path) for path, leaf in leaves}


def _check_leaf(leaf: Any, path: Any) -> None:
    where = jax.tree_util.keystr(path)
    if isinstance(leaf, jax.Array):
        what = None
        if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            what = "is on devices of other processes: gather it, or use Orbax's own handler"
        elif leaf.is_fully_addressable and jax.process_count() > 1:
            # Only that of the first process would be saved, and replace all others at a restore.
            what = "is on devices of one process and may differ in others: replicate it across all processes"
        if what is not None:
            raise UnsupportedFormatError(f"{where} {what}")
    elif isinstance(leaf, (np.ndarray, np.generic)):
        try:
            to_torch(np.empty(0, leaf.dtype))
        except UnsupportedFormatError as error:
            raise UnsupportedFormatError(f"{where}: {error}") from None
    elif not (leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes))):
        raise UnsupportedFormatError(
            f"{where}: expected an array or a plain value, not {type(leaf).__name__}"
        )


def _pack_leaf(leaf: Any, path: Any) -> dict[str, Any]:
    _check_leaf(leaf, path)
    if isinstance(leaf, jax.Array):
        if not leaf.is_fully_addressable:
            # Any replica will do. This is done in one process alone, so no other is to take part.
            leaf = leaf.addressable_data(0)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            kind = str(jax.random.key_impl(leaf))
            return {"key": to_torch(np.asarray(jax.random.key_data(leaf))), "impl": kind}
        return {"jax": to_torch(np.asarray(leaf)), "dtype": leaf.dtype.name}
    if isinstance(leaf, (np.ndarray, np.generic)):
        kind = "numpy" if isinstance(leaf, np.ndarray) else "scalar"
        return {kind: to_torch(np.asarray(leaf)), "dtype": leaf.dtype.name}
    return {"plain": leaf}


def _unpack(packed: dict[str, Any], item: Any, where: str) -> Any:
    if item is None:
        return {path: _unpack_leaf(kept, None, path, where) for path, kept in packed.items()}
    leaves, structure = jax.tree_util.tree_flatten_with_path(item)
    wanted = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    if wanted.keys() != packed.keys():
        missing, more = [*(wanted.keys() - packed.keys())], [*(packed.keys() - wanted.keys())]
        raise MismatchError(f"{where}: missing in the checkpoint: {missing}; unexpected in the checkpoint: {more}")
    found = [_unpack_leaf(packed[path], leaf, path, where) for path, leaf in wanted.items()]
    return jax.tree_util.tree_unflatten(structure, found)


def _unpack_leaf(kept: dict[str, Any], like: Any, path: str, where: str) -> Any:
    if "plain" in kept:
        return kept["plain"]
    if "key" in kept:
        data = jnp.asarray(to_numpy(kept["key"], "uint32"))
        kind, values = "jax", jax.random.wrap_key_data(data, impl=kept["impl"])
    else:
        kind = next(name for name in ("jax", "numpy", "scalar") if name in kept)
        values = to_numpy(kept[kind], kept["dtype"])
    if like is not None and hasattr(like, "shape"):
        has, wants = ((tuple(of.shape), _dtype(of.dtype)) for of in (values, like))
        if has != wants:
            raise MismatchError(f"{where}: {path}: saved {has}, expected {wants}")
    if kind == "jax":
        return jax.device_put(values, getattr(like, "sharding", None))
    return values if kind == "numpy" else values[()]


def _dtype(dtype: Any) -> Any:
    # NumPy has none for random keys.
    return dtype if jnp.issubdtype(dtype, jax.dtypes.prng_key) else jnp.dtype(dtype)
