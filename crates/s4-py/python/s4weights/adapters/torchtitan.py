"""torchtitan: a checkpoint manager that saves to a `CheckpointStore`.

In a training configuration, in place of ``CheckpointManager.Config``::

    from s4weights.adapters.torchtitan import StoreCheckpointManager

    checkpoint=StoreCheckpointManager.Config(enable=True, interval=500, keep_latest_k=10)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .._entries import Retention
from .._store import CheckpointStore
from ._common import require, step_in

require("torchtitan", "0.3", "torchtitan")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType  # noqa: E402
from torchtitan.components.checkpointer.base import MODEL  # noqa: E402
from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager  # noqa: E402
from torchtitan.tools.utils import GarbageCollection  # noqa: E402

from ..dcp import LoadPlanner, StorageReader, StorageWriter  # noqa: E402

__all__ = ["StoreCheckpointManager"]


class StoreCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """torchtitan's own manager, with a store instead of the folders ``step-N``.

    ``keep_latest_k`` sets how many checkpoints the store keeps. Hugging Face checkpoints remain folders.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """The configuration of ``CheckpointManager``, with additional fields."""

        store: str = ""
        """Folder or URL of the store. If empty, the checkpoint folder is used."""

        preset: str = "balanced"
        """As in `CheckpointStore`."""

    def __init__(self, config: Config, **arguments: Any) -> None:
        super().__init__(config, **arguments)
        if self.enable:
            kept = Retention(keep_last=self.keep_latest_k) if self.keep_latest_k > 0 else None
            url = config.store or self.folder
            self._store = CheckpointStore(url, retention=kept, preset=config.preset)

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Called by the manager to save a step."""
        if to_hf:
            return super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
        # A new one for each save: a background save keeps using its own.
        writer = StorageWriter(self._store, step=step_in(checkpoint_id))
        done = None
        if async_mode == AsyncMode.DISABLED:
            dcp.save(state_dict, storage_writer=writer)
        elif async_mode == AsyncMode.ASYNC:
            done = dcp.async_save(state_dict, storage_writer=writer, process_group=self.pg)
        else:
            done = dcp.async_save(
                state_dict,
                storage_writer=writer,
                process_group=self.pg,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                async_stager=self.stager,
            )
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return done

    def dcp_load(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        from_hf: bool,
        from_quantized: bool,
    ) -> None:
        """Called by the manager to load a step, or a checkpoint from elsewhere."""
        step = self._step_of(checkpoint_id)
        if from_hf or step is None:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        reader = StorageReader(self._store, step=step)
        dcp.load(state_dict, storage_reader=reader, planner=LoadPlanner())
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)

    def _load(self, step: int = -1) -> bool:
        found = self._find_load_step() if step == -1 else step
        if found not in self._steps():
            return bool(super()._load(step))
        states = self._states_to_load(model_only=found == 0)
        self.dcp_load(states, self._create_checkpoint_id(found), False, False)
        GarbageCollection.collect("GC collection for checkpoint loading.")
        return True

    def _find_load_step(self, folder: str = "") -> int:
        found = int(super()._find_load_step(folder))
        return found if folder else max([found, *self._steps()])

    def _step_of(self, checkpoint_id: str) -> int | None:
        """The step of the store that one of the manager's paths refers to, if there is one."""
        steps = self._steps()
        return next((n for n in steps if self._create_checkpoint_id(n) == checkpoint_id), None)

    def _steps(self) -> list[int]:
        return [entry.step for entry in self._store.list()]
