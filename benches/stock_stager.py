"""PyTorch's own stager for `dcp.async_save`, as in its recipe for fast staging: a peer of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def pinned_stager(cuda: bool = True) -> Iterator[Any]:
    """A stager that copies to page-locked memory, kept between saves, while the caller goes on.

    Raises `ImportError` if this version of PyTorch has no such stager.
    """
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    class Kept(DefaultStager):
        """Some versions of PyTorch close the stager while a save still needs it."""

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
    # The part that copies cannot be used again once it is closed.
    copies = stager._state_dict_stager
    close, copies.close = copies.close, lambda: None
    try:
        yield stager
    finally:
        copies.close = close
        DefaultStager.close(stager)
