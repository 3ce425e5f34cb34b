"""With `S4_UPSTREAM=1`, PyTorch's saves and loads are ours in every process, and its storage for
distributed checkpoints is a store. For the purpose see `s4_upstream`.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any


def _replace() -> None:
    import torch.distributed.checkpoint as dcp
    import torch.distributed.checkpoint.filesystem as files
    import torch.distributed.checkpoint.state_dict_loader as loader
    import torch.distributed.checkpoint.state_dict_saver as saver

    import s4weights
    from s4weights.dcp import StorageReader, StorageWriter

    class Writer(StorageWriter):
        """Every folder is a store of one step."""

        def __init__(self, path: Any, *_: Any, **__: Any) -> None:
            super().__init__(os.fspath(path), step=0)

        def reset(self, checkpoint_id: Any = None) -> None:
            if checkpoint_id is None:
                super().reset()
            else:
                Writer.__init__(self, checkpoint_id)

    class Reader(StorageReader):
        def __init__(self, path: Any, *_: Any, **__: Any) -> None:
            super().__init__(os.fspath(path))

        def reset(self, checkpoint_id: Any = None) -> None:
            if checkpoint_id is None:
                super().reset()
            else:
                Reader.__init__(self, checkpoint_id)

    def set_up(storage: Any, checkpoint_id: Any, reader: bool = False) -> Any:
        if storage is None:
            return Reader(checkpoint_id) if reader else Writer(checkpoint_id)
        if checkpoint_id is not None:
            storage.reset(checkpoint_id)
        return storage

    for module in (dcp, files):
        module.FileSystemWriter, module.FileSystemReader = Writer, Reader
    for module in (loader, saver):
        module._storage_setup = set_up
    s4weights.patch()


if os.environ.get("S4_UPSTREAM"):
    # This may be the Python of another program, without PyTorch.
    with contextlib.suppress(ImportError):
        _replace()
