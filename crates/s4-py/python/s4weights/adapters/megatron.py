"""Megatron-Core: strategies of ``dist_checkpointing`` that save to a `CheckpointStore`.

::

    from s4weights.adapters.megatron import LoadStrategy, SaveStrategy

    dist_checkpointing.save(sharded, "out/iter_0000500", SaveStrategy("runs/a"))
    state = dist_checkpointing.load(sharded, "out/iter_0000500", LoadStrategy("runs/a"))
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from ._common import Store, as_store, require, step_in

require("megatron", "0.19", "megatron-core")

import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from megatron.core.dist_checkpointing.strategies import torch as _strategies  # noqa: E402
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest  # noqa: E402
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME  # noqa: E402

from ..dcp import StorageReader, StorageWriter  # noqa: E402

__all__ = ["LoadStrategy", "SaveStrategy"]

#: The key of the state that is not sharded.
_COMMON = "common_state"


class SaveStrategy(_strategies.TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Saves the tensors of a checkpoint folder to a store, under the step at the end of its name.

    The folder keeps the files that Megatron-Core expects there: ``metadata.json``, which commits
    it, and ``common.pt``, with the data that is not sharded.

    Args:
        store: a `CheckpointStore`, or its folder or URL.
        options: arguments of `CheckpointStore`, if ``store`` is not one.
    """

    def __init__(self, store: Store, **options: Any) -> None:
        super().__init__()
        self.store = as_store(store, options)

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Called by ``dist_checkpointing.save``, on every rank."""
        sharded = dict(sharded_state_dict)
        common = sharded.pop(_COMMON, None)
        if common is not None and torch.distributed.get_rank() == 0:
            torch.save(common.data, os.path.join(checkpoint_dir, COMMON_STATE_FNAME))
        found, _, _ = _strategies._replace_state_dict_keys_with_sharded_keys(
            sharded, self.keep_only_main_replica
        )
        planner = _strategies.MCoreSavePlanner(
            dedup_replicated_tensors=not self.keep_only_main_replica,
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
        )
        dcp.save(
            _strategies.mcore_to_pyt_state_dict(found, False),
            storage_writer=StorageWriter(self.store, step=step_in(checkpoint_dir)),
            planner=planner,
        )

    def async_save(
        self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "nvrx"
    ) -> Any:
        """Called for a background save. Saves before it returns, so that only the commit remains."""
        self.save(sharded_state_dict, checkpoint_dir)
        return AsyncRequest(None, (), [])


class LoadStrategy(_strategies.TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Loads a checkpoint saved by `SaveStrategy`, with any number of ranks.

    Args:
        store: as in `SaveStrategy`.
        options: as in `SaveStrategy`.
    """

    def __init__(self, store: Store, **options: Any) -> None:
        super().__init__()
        self.store = as_store(store, options)

    def load(
        self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "mcore"
    ) -> Any:
        """Called by ``dist_checkpointing.load``, on every rank."""
        with self._reading(checkpoint_dir):
            return super().load(sharded_state_dict, checkpoint_dir, async_strategy)

    def load_tensors_metadata(self, checkpoint_dir: Any, metadata: Any = None) -> Any:
        """Return the shapes and dtypes of the stored tensors."""
        with self._reading(checkpoint_dir):
            return super().load_tensors_metadata(checkpoint_dir, metadata)

    def load_sharded_metadata(self, checkpoint_dir: Any) -> Any:
        """Like `load_tensors_metadata`, including objects that are not tensors."""
        with self._reading(checkpoint_dir):
            return super().load_sharded_metadata(checkpoint_dir)

    @contextlib.contextmanager
    def _reading(self, checkpoint_dir: Any) -> Iterator[None]:
        """Make Megatron-Core's strategy read the store: replace the function that it gets its reader from."""
        reader = StorageReader(self.store, step=step_in(checkpoint_dir))
        before = _strategies._get_filesystem_reader
        _strategies._get_filesystem_reader = lambda *_, **__: reader
        try:
            yield
        finally:
            _strategies._get_filesystem_reader = before
