"""Orbax with JAX: saved, killed, resumed. Run by ``cargo xtask test --adapters``."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import s4weights
from harness import die, run_guide, run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("orbax") is None, reason="needs orbax-checkpoint"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

STEPS = 6


def first_state() -> Any:
    import jax
    import jax.numpy as jnp
    import numpy as np

    w = jax.random.normal(jax.random.key(0), (64, 48))
    return {
        "params": {"w": w.astype(jnp.bfloat16), "master": w, "none": jnp.zeros((0, 3))},
        "moments": [jnp.zeros_like(w), (jnp.zeros_like(w), None)],
        "random": jax.random.key(7),
        "seen": np.zeros((), np.int64),
        "few": w[:2].astype(jnp.float8_e4m3fn),
        "step": 0,
    }


def update(state: Any) -> Any:
    import jax
    import jax.numpy as jnp

    random, now = jax.random.split(state["random"])
    gradient = state["params"]["master"] + jax.random.normal(now, (64, 48))
    first = 0.9 * state["moments"][0] + 0.1 * gradient
    second = 0.99 * state["moments"][1][0] + 0.01 * gradient**2
    master = state["params"]["master"] - 0.01 * first / (jnp.sqrt(second) + 1e-8)
    return {
        "params": {**state["params"], "master": master, "w": master.astype(jnp.bfloat16)},
        "moments": [first, (second, None)],
        "random": random,
        "seen": state["seen"] + 4,
        "few": master[:2].astype(jnp.float8_e4m3fn),
        "step": state["step"] + 1,
    }


def manager_of(folder: str, background: bool) -> Any:
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=background)
    return ocp.CheckpointManager(Path(folder).absolute(), options=options)


def train(folder: str, how: str, die_at: str) -> None:
    from s4weights.adapters.orbax import S4Restore, S4Save

    manager, state = manager_of(folder, how == "background"), first_state()
    if manager.latest_step() is not None:
        state = manager.restore(manager.latest_step(), args=S4Restore(state))
        assert state["step"] == manager.latest_step()
    while state["step"] < STEPS:
        state = update(state)
        if state["step"] == int(die_at):
            die()
        manager.save(state["step"], args=S4Save(state))
    manager.close()


def details(folder: str) -> None:
    """Types, dtypes, shardings and values are restored as they were saved."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from s4weights.adapters.orbax import S4Restore, S4Save

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    state = update(first_state())
    state["params"]["w"] = jax.device_put(state["params"]["w"], split)
    state["random"] = jax.device_put(jax.random.split(state["random"], 4), split)
    manager = manager_of(folder, True)
    manager.save(1, args=S4Save(state))
    manager.wait_until_finished()
    there = manager.restore(1, args=S4Restore(jax.tree.map(abstract, state)))
    assert jax.tree.structure(there) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(there), jax.tree.leaves(state), strict=True):
        assert type(a) is type(b)
        if isinstance(b, jax.Array):
            assert a.dtype == b.dtype and a.sharding == b.sharding
            if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert len(there["params"]["w"].sharding.device_set) == 2
    assert len(there["random"].sharding.device_set) == 2
    flat = manager.restore(1, args=S4Restore())
    assert flat["['params']['w']"].dtype == jnp.bfloat16 and flat["['step']"] == 1
    random = jax.random
    for wrong in (
        {"x": 1},
        {**state, "few": jnp.zeros(3)},
        {**state, "few": random.key(7)},
        {**state, "random": random.split(random.key(7))},
        {**state, "random": random.key(7, impl="rbg")},
        {**state, "random": jnp.zeros(2, jnp.uint32)},
    ):
        with pytest.raises(s4weights.MismatchError, match=r"few|random|missing in the checkpoint"):
            manager.restore(1, args=S4Restore(wrong))
    with pytest.raises(s4weights.UnsupportedFormatError, match=r"\['x'\]: object"):
        manager.save(2, args=S4Save({"x": object()}))


def abstract(leaf: Any) -> Any:
    import jax

    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def several(folder: str) -> None:
    """With several processes the first one writes, and no process's own arrays are lost."""
    from types import SimpleNamespace

    import jax
    import jax.numpy as jnp
    import numpy as np

    from s4weights.adapters import orbax as adapter
    from s4weights.adapters.orbax import S4Handler, S4Save

    class Shared(jax.Array):
        """Stands for an array that is replicated over processes."""

        is_fully_addressable, is_fully_replicated = False, True
        dtype = jnp.dtype("float32")

        def addressable_data(self, index: int) -> Any:
            return jnp.arange(3.0)

    Shared.__abstractmethods__ = frozenset()
    state = {"w": Shared(), "step": 7, "seen": np.zeros(2)}
    at = SimpleNamespace(process=1)
    jax.process_index, jax.process_count = lambda *_: at.process, lambda *_: 2
    file = Path(folder, "tree.s4w")
    handler = S4Handler()
    adapter._check_leaf(Shared(), ())
    handler.save(Path(folder), S4Save(dict(state)))
    assert asyncio.run(handler.async_save(Path(folder), S4Save(dict(state)))) == []
    assert not file.exists()
    at.process = 0
    handler.save(Path(folder), S4Save(dict(state)))
    assert s4weights.load(file)["['w']"]["jax"].tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(s4weights.UnsupportedFormatError, match=r"\['x'\] is on devices of one"):
        S4Save({"x": jnp.zeros(3)})


def guide(folder: str) -> None:
    os.chdir(folder)
    names = run_guide("orbax.md", {"state": first_state(), "train_one_step": update})
    assert names["manager"].latest_step() == 3 and names["state"]["step"] == 3


@pytest.mark.parametrize("how", ["blocking", "background"])
def test_a_killed_run_resumes_to_the_same_bits(how: str, tmp_path: Path) -> None:
    killed, whole = str(tmp_path / "killed"), str(tmp_path / "whole")
    assert run_ranks(1, "test_orbax", "train", killed, how, "4") == [-signal.SIGKILL]
    assert run_ranks(1, "test_orbax", "train", killed, how, "0") == [0]
    assert run_ranks(1, "test_orbax", "train", whole, how, "0") == [0]
    for step in ("5", "6"):
        ours, theirs = (Path(p, step, "default/tree.s4w").read_bytes() for p in (killed, whole))
        assert ours == theirs  # States that are the same bit for bit make the same file.


def test_every_kind_of_leaf(tmp_path: Path) -> None:
    assert run_ranks(1, "test_orbax", "details", str(tmp_path)) == [0]


def test_with_several_processes_the_first_one_writes(tmp_path: Path) -> None:
    assert run_ranks(1, "test_orbax", "several", str(tmp_path)) == [0]


def test_the_guide(tmp_path: Path) -> None:
    assert run_ranks(1, "test_orbax", "guide", str(tmp_path)) == [0]


def test_arrays_of_other_things_than_numbers_are_refused_by_name(tmp_path: Path) -> None:
    import numpy as np

    from s4weights.adapters.orbax import S4Handler, S4Save

    for values in (np.array(["text"]), np.array([None, {}], object), np.str_("text")):
        with pytest.raises(s4weights.UnsupportedFormatError, match=r"\['a'\]: .*: not numbers"):
            S4Handler().save(tmp_path, S4Save({"a": values}))
