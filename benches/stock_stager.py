"""PyTorch's own stager for `dcp.async_save`, as its recipe for fast staging has it: the peer of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def pinned_stager(cuda: bool = True) -> Iterator[Any]:
    """A stager that copies to page-locked memory, which it keeps between saves, while the caller goes on.

    Raises `ImportError` where PyTorch has none.
    """
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    class Kept(DefaultStager):
        """Versions of PyTorch close the stager of a save that still needs it."""

        def close(self) -> None:
            pass

    stager = Kept(
        StagingOptions(
            use_pinned_memory=cuda,
            use_shared_memory=False,
            use_async_staging=cuda,
            use_non_blocking_copy=cuda,
        )
    )
    # What it copies with can be used again only until it is closed.
    copies = stager._state_dict_stager
    close, copies.close = copies.close, lambda: None
    try:
        yield stager
    finally:
        copies.close = close
        DefaultStager.close(stager)
