"""DeepSpeed: an engine's checkpoints as ``.s4w`` files.

::

    from s4weights.adapters.deepspeed import use_s4weights

    engine, *_ = deepspeed.initialize(model=model, config=config)
    use_s4weights(engine)
"""

from __future__ import annotations

import logging
import os
from typing import Any

from .._errors import S4Error
from .._load import load
from .._pending import PendingFile
from .._save import save
from ._common import require

require("deepspeed", "0.17", "deepspeed")

import torch.distributed as dist  # noqa: E402
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine  # noqa: E402

__all__ = ["S4CheckpointEngine", "use_s4weights"]

logger = logging.getLogger("s4weights")


def use_s4weights(engine: Any, **options: Any) -> S4CheckpointEngine:
    """Make a DeepSpeed engine save and load with an `S4CheckpointEngine` with these options.

    DeepSpeed has no setting for this.

    Raises:
        TypeError: it is not an engine from ``deepspeed.initialize``, or its own checkpoint engine
            determines which ranks write.
    """
    before = getattr(engine, "checkpoint_engine", None)
    if not isinstance(before, CheckpointEngine):
        raise TypeError(f"expected an engine from deepspeed.initialize, not {type(engine).__name__}")
    if type(before).__name__ not in ("TorchCheckpointEngine", "S4CheckpointEngine"):
        raise TypeError(
            f'{type(before).__name__} is not supported: remove "checkpoint": {{"writer"...}} from the DeepSpeed JSON'
        )
    engine.checkpoint_engine = ours = S4CheckpointEngine(**options)
    return ours


class S4CheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Writes each file of a checkpoint as ``.s4w``, under DeepSpeed's name for it.

    A failure on any rank is raised on all of them, and ``latest`` keeps naming the previous
    checkpoint.

    Args:
        config_params: not used; accepted because DeepSpeed passes it.
        blocking: ``False`` writes in the background until the next gradient accumulation boundary,
            where DeepSpeed updates ``latest``. After the very last step, DeepSpeed does not update
            it.
        weights_only: refuse pickled code when loading. DeepSpeed itself does not, and its ZeRO
            states contain objects of its own classes, which `torch.serialization.add_safe_globals`
            can allow.
        options: arguments of `s4weights.save`, such as ``preset``.
    """

    def __init__(
        self,
        config_params: Any = None,
        *,
        blocking: bool = True,
        weights_only: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(config_params)
        self.name = "S4CheckpointEngine"
        self._blocking, self._weights_only, self._options = blocking, weights_only, options
        self._info: Any = None
        self._pending: list[PendingFile] = []
        self._failed: BaseException | None = None
        self._last: tuple[tuple[Any, ...], Any] | None = None

    def create(self, info: Any) -> None:
        """Called on every rank before a checkpoint."""
        if self._info is not None:
            # No boundary came between two checkpoints: this does what the engine does at one.
            before = self._info
            self.commit(before)
            many = dist.is_available() and dist.is_initialized()
            if before.save_latest and (not many or dist.get_rank() == 0):
                with open(os.path.join(before.save_dir, "latest"), "w") as file:
                    file.write(before.tag)
        self._info, self._failed = (None if self._blocking else info), None

    def save(self, state_dict: Any, path: str | os.PathLike[str]) -> None:
        """Write a file, or start writing it in the background."""
        try:
            if self._blocking:
                save(state_dict, os.fspath(path), **self._options)
            else:
                done = save(state_dict, os.fspath(path), blocking=False, **self._options)
                self._pending.append(done)
        except Exception as error:
            # The other ranks wait in `commit`, which raises the error on all of them.
            logger.error("%s: not saved: %s", path, error)
            self._failed = error

    def commit(self, info: Any) -> bool:
        """Called on every rank after its files. Returns once all ranks have written theirs.

        Raises:
            S4Error: a rank failed to write its files; the message contains the rank.
        """
        self._info = None
        pending, self._pending = self._pending, []
        for file in pending:
            try:
                file.wait()
            except Exception as error:
                self._failed = self._failed or error
        failed, self._failed = self._failed, None
        failures: list[str | None] = [None if failed is None else str(failed)]
        if dist.is_available() and dist.is_initialized():
            mine = failures[0]
            failures = [None] * dist.get_world_size()
            dist.all_gather_object(failures, mine)
        for rank, what in enumerate(failures):
            if what is not None:
                raise S4Error(
                    f"checkpoint {info.tag}: not saved by rank {rank}: {what}"
                ) from failed
        return True

    def load(self, path: str | os.PathLike[str], map_location: Any = None) -> Any:
        """Load a file of either format."""
        status = os.stat(path)
        key = (os.fspath(path), status.st_mtime_ns, status.st_size)
        last, self._last = self._last, None
        if last is not None and last[0] == key:
            return last[1]
        loaded = load(os.fspath(path), map_location, weights_only=self._weights_only)
        if callable(map_location):
            # This is how DeepSpeed loads weights, twice in a row: to inspect and then to load them.
            self._last = key, loaded
        return loaded

    def is_decoupled(self) -> bool:
        """Whether DeepSpeed commits later, at the next boundary."""
        return not self._blocking

    def get_commit_info(self) -> Any:
        """The checkpoint that is still to be committed, or ``None`` if there is none."""
        return self._info

    def cleanup(self) -> None:
        """Called when the engine ends: waits for the files of a checkpoint."""
        for file in self._pending:
            file.wait()
