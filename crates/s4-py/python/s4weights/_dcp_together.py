"""If a rank fails before a distributed save or load exchanges anything, all ranks fail, so that
none of them waits for it forever.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict_loader as loader
from torch.distributed.checkpoint.api import CheckpointException

from . import _live
from ._errors import S4Error

P = ParamSpec("P")
T = TypeVar("T")

#: Types of the error that DCP raises on a rank that has failed already, for the failure that it was
#: told of. (DCP's own exception is not an `Exception`.)
_SAME = (Exception, CheckpointException)

#: Background saves of this process that have not ended. They exchange on a separate thread.
_running: set[Future[Any]] = set()
_live.at_fork(_running.clear)

#: The names of the threads on which `dcp.async_save` saves begin with this. Such a thread ends with its save.
_THREADS = "AsyncCheckpointExecutor"

#: Whether DCP's `load` exchanges keys before it calls `state_dict` of each `Stateful`, as older versions do.
_EXCHANGES_KEYS = hasattr(loader, "_all_gather_keys")


def exchanges(save: Future[Any]) -> None:
    """Record a background save: until it ends, a failing rank exchanges nothing."""
    _running.add(save)
    save.add_done_callback(_running.discard)


def _wait_for_others() -> None:
    """Wait for background saves: if two threads exchanged at the same time, the ranks would mix up their messages."""
    wait(list(_running))
    # Those begun by DCP's own `async_save`, with whatever storage.
    for thread in threading.enumerate():
        if thread.name.startswith(_THREADS) and thread is not threading.current_thread():
            thread.join()


def sendable(error: BaseException) -> BaseException:
    """The error or, if it cannot be pickled and read back, an `S4Error` with its type and text. DCP
    sends errors to all ranks: if sending fails on one rank, the others wait for it.
    """
    try:
        if isinstance(pickle.loads(pickle.dumps(error)), BaseException):
            return error
    except Exception:  # A class of the caller may raise anything.
        pass
    return S4Error(f"{type(error).__name__}: {error}")


def sends_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method that DCP calls, so that its errors can be sent to other ranks."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if (instead := sendable(error)) is error:
                raise
            raise instead from error

    return call


def or_no_save(
    group: Any, no_dist: bool, begun: Callable[[], bool] = lambda: False
) -> contextlib.AbstractContextManager[None]:
    """Wrap a rank's work before DCP's `save` exchanges anything: if it raises, this rank takes part
    in the save that the others have begun, and makes it fail on all of them. ``begun``: whether the
    exchange has begun, if that is part of the work. From then on DCP itself tells the others.
    """

    def refuse(error: Exception) -> None:
        dcp.save({}, storage_writer=_NoWriter(error), process_group=group)

    return _or_refuse(group, no_dist, refuse, begun)


def or_no_load(
    group: Any,
    no_dist: bool,
    before: Callable[[], object] = lambda: None,
    begun: Callable[[], bool] = lambda: False,
    has_keys: bool = False,
) -> contextlib.AbstractContextManager[None]:
    """Like `or_no_save`, for a load. ``before``: the exchange that precedes DCP's `load`. ``has_keys``: whether the
    work is DCP's `load` of a state that has keys, which are no reason for it to fail.
    """

    def refuse(error: Exception) -> None:
        before()
        # The others may have this rank's keys already.
        load = loader._load_state_dict if has_keys and _EXCHANGES_KEYS else dcp.load
        load({}, storage_reader=_NoReader(error), process_group=group)

    return _or_refuse(group, no_dist, refuse, begun)


@contextlib.contextmanager
def _or_refuse(
    group: Any,
    no_dist: bool,
    refuse: Callable[[Exception], object],
    begun: Callable[[], bool],
) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not begun() and _has_others(group, no_dist):
            with contextlib.suppress(*_SAME):
                _wait_for_others()
                refuse(error)
        raise


def _has_others(group: Any, no_dist: bool) -> bool:
    if no_dist or not dist.is_available() or not dist.is_initialized():
        return False
    return bool(dist.get_world_size(group) > 1)


class _No:
    """Raises an error as soon as DCP exchanges errors."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise sendable(self._error)

    def reset(self, checkpoint_id: Any = None) -> None:
        """There is nothing to reset."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


class _NoWriter(_No, dcp.StorageWriter):  # type: ignore[misc]
    set_up_storage_writer = prepare_local_plan = prepare_global_plan = _No._refuse
    write_data = finish = _No._refuse


class _NoReader(_No, dcp.StorageReader):  # type: ignore[misc]
    read_metadata = set_up_storage_reader = prepare_local_plan = _No._refuse
    prepare_global_plan = read_data = _No._refuse
