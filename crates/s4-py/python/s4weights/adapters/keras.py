"""Keras: saves the weights and optimizer of a model in a `CheckpointStore`, with any backend.

::

    from s4weights.adapters.keras import StoreCallback, restore

    first = restore("runs/a", model)
    model.fit(x, y, epochs=90, initial_epoch=first, callbacks=[StoreCallback("runs/a")])
"""

from __future__ import annotations

from typing import Any

from .._errors import MismatchError
from .._pending import Pending
from ._common import Store, as_store, load_found, require

require("keras", "3.0", "keras")

import keras  # noqa: E402
import numpy as np  # noqa: E402

from ._arrays import to_numpy, to_torch  # noqa: E402

__all__ = ["StoreCallback", "get_state", "restore", "set_state"]


class StoreCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves a model and its optimizer after each epoch; the step is the number of epochs.

    Args:
        store: a `CheckpointStore`, its folder or its URL.
        every: number of epochs between checkpoints.
        blocking: ``False`` saves in the background; the next save, or the end of the training,
            raises its error.
        options: arguments of `CheckpointStore`, if ``store`` is not one.
    """

    def __init__(
        self, store: Store, *, every: int = 1, blocking: bool = True, **options: Any
    ) -> None:
        super().__init__()
        self.store = as_store(store, options)
        self.every, self.blocking = every, blocking
        self._pending: Pending[Any] | None = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Called by Keras."""
        if (epoch + 1) % self.every:
            return
        metrics = _metrics(logs or {})
        state = get_state(self.model)
        if self.blocking:
            self.store.save_checkpoint(state, epoch + 1, metrics)
        else:
            # `get_state` has copied the arrays already.
            self._pending = self.store.save_checkpoint(
                state, epoch + 1, metrics, blocking=False, stage="lazy"
            )

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Called by Keras: waits for the save in the background."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()


def restore(store: Store, model: Any, step: int | None = None, **options: Any) -> int:
    """Load a checkpoint saved by `StoreCallback` into a compiled and built model.

    Args:
        store: as in `StoreCallback`.
        model: a Keras model.
        step: the number of epochs. ``None`` means the newest checkpoint.
        options: as in `StoreCallback`.

    Returns:
        The number of epochs, for ``initial_epoch=``; 0 if no step is given and the store has no
        checkpoint yet.

    Raises:
        NotFoundError: the checkpoint does not exist.
        MismatchError: it belongs to another model or optimizer.
    """
    kept = as_store(store, options)
    found = load_found(kept, step)
    if found is None:
        return 0
    set_state(model, found[1])
    return found[0]


def get_state(model: Any) -> dict[str, Any]:
    """Return copies of all variables of a model and its optimizer, including the random seeds of
    layers, as a dict that `s4weights.save` and stores can save.
    """
    return {
        part: [
            {"name": v.path, "dtype": keras.backend.standardize_dtype(v.dtype), "value": _value(v)}
            for v in variables
        ]
        for part, variables in _variables(model).items()
    }


def set_state(model: Any, state: dict[str, Any]) -> None:
    """Assign the values from `get_state` to the variables of a model.

    They are assigned in order, not by name, because Keras gives the layers of two models different
    names.

    Raises:
        MismatchError: the variables of the model are different.
    """
    for part, variables in _variables(model).items():
        kept = state.get(part, [])
        has = [(entry["dtype"], tuple(_array(entry).shape)) for entry in kept]
        wants = [(keras.backend.standardize_dtype(v.dtype), tuple(v.shape)) for v in variables]
        if has != wants:
            differ = next(
                (i for i, (a, b) in enumerate(zip(has, wants, strict=False)) if a != b), None
            )
            what = f"saved {len(has)} variables, expected {len(wants)}"
            if differ is not None:
                what = f"{variables[differ].path}: saved {has[differ]}, expected {wants[differ]}"
            raise MismatchError(f"{part}: {what}")
        for entry, variable in zip(kept, variables, strict=True):
            variable.assign(_array(entry))


def _metrics(logs: dict[str, Any]) -> dict[str, float]:
    """Those that are one finite number: some, such as ``F1Score``, are one for each class."""
    found: dict[str, float] = {}
    for name, value in logs.items():
        try:
            number = float(value) if np.ndim(value) == 0 else np.nan
        except (TypeError, ValueError):
            continue
        if np.isfinite(number):
            found[name] = number
    return found


def _variables(model: Any) -> dict[str, list[Any]]:
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    metrics = {id(v) for metric in getattr(model, "metrics", []) for v in metric.variables}
    found = {"model": [v for v in model.variables if id(v) not in metrics]}
    if optimizer is not None:
        found["optimizer"] = [*optimizer.variables]
    return found


def _value(variable: Any) -> Any:
    return to_torch(np.asarray(keras.ops.convert_to_numpy(variable)))


def _array(entry: dict[str, Any]) -> np.ndarray[Any, Any]:
    return to_numpy(entry["value"], entry["dtype"])
