"""Weights on CUDA devices: applied in place, and staged for DCP within the device.

Skipped if there is no device, or an error if ``S4_REQUIRE_GPU=1``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from s4weights import _dcp_place
from s4weights.dcp import Stager, StorageReader, StorageWriter
from s4weights.sync import Publisher, Subscriber

if os.environ.get("S4_REQUIRE_GPU") != "1" and not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(autouse=True, scope="module")
def nothing_is_kept() -> Iterator[None]:
    """Closes the stores that ranks keep for their next deltas; tests of other files need none."""
    yield
    while _dcp_place._stores:
        _dcp_place._stores.pop()[2].close()


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Tensors on the device, one in host memory, and one that is not contiguous."""
    generator = torch.Generator("cuda").manual_seed(seed)
    made = torch.randn(1 << 20, device="cuda", generator=generator) * 0.02
    return {
        "w": made.bfloat16(),
        "turned": made[:9000].reshape(90, 100).clone().T,
        "small": made[:7].clone(),
        "host": made[:5000].cpu(),
        "ids": torch.arange(20_000, device="cuda") * (seed + 1),
    }


def change(state: dict[str, torch.Tensor], step: int) -> None:
    """Changes some values, those of ``w`` by the last bit."""
    state["w"].view(torch.int16)[step::300] ^= 1
    state["turned"][step] += 1e-4
    state["host"][step] += 1
    state["ids"][step::40] += 1


@pytest.mark.parametrize("listen", [None, "tcp://127.0.0.1:0"])
def test_deltas_are_applied_on_the_device(tmp_path: Path, listen: str | None) -> None:
    trainer, sampler = weights(1), weights(2)
    places = {name: tensor.data_ptr() for name, tensor in sampler.items()}
    with (
        Publisher(tmp_path, listen=listen) as publisher,
        Subscriber(publisher.address or tmp_path, sampler) as subscriber,
    ):
        for step in range(5):
            publisher.publish_delta(trainer, step)
            done = subscriber.apply_delta(wait=10.0)
            assert done is not None and done.deltas == min(step, 1)
            for name, tensor in trainer.items():
                assert torch.equal(sampler[name], tensor), f"{name} of step {step}"
            change(trainer, step)
        # Something else changes the weights on the device: all of them are read again.
        sampler["w"][1000] += 1
        publisher.publish_delta(trainer, 5)
        assert subscriber.apply_delta() is not None
        assert all(torch.equal(sampler[name], tensor) for name, tensor in trainer.items())
    assert {name: tensor.data_ptr() for name, tensor in sampler.items()} == places


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_what_is_staged_stays_what_it_was(tmp_path: Path, device: str) -> None:
    stager = Stager(device=device)
    for step in range(4):
        state = weights(step)
        expected = {name: tensor.clone() for name, tensor in state.items()}
        writer = StorageWriter(tmp_path, step=step)
        future = dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True)
        for tensor in state.values():
            tensor.zero_()
        future.result()
        loaded = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
        dcp.load(loaded, storage_reader=StorageReader(tmp_path, step=step), no_dist=True)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    stager.close()


def test_copies_on_the_device_are_freed_with_the_save(tmp_path: Path) -> None:
    state = {"w": torch.randn(64 << 20, device="cuda")}
    stager = Stager()
    free = []
    for step in range(6):
        writer = StorageWriter(tmp_path, step=step, base=True)
        dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True).result()
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[1] - free[-1] < state["w"].nbytes, f"{free}: they are kept"


class Cut(dcp.DefaultLoadPlanner):
    """Loads parts of stored tensors into separate tensors."""

    def __init__(self, targets: list[torch.Tensor]) -> None:
        super().__init__()
        self.targets = targets
        self.committed: list[int] = []

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.targets[self.place(read_item)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.committed.append(self.place(read_item))

    def place(self, item: ReadItem) -> int:
        index = item.dest_index.index
        assert index is not None
        return index


@pytest.mark.parametrize("short_of_memory", [False, True])
def test_parts_of_stored_tensors_are_cut_on_the_device(
    tmp_path: Path, short_of_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = {
        "w": torch.randn(600, 500, device="cuda") * 0.02,
        "b": torch.randn(900, device="cuda"),
    }
    dcp.save(stored, storage_writer=StorageWriter(tmp_path, step=0, base=True), no_dist=True)
    stored["w"][::7] += 1e-4
    dcp.save(stored, storage_writer=StorageWriter(tmp_path, step=1), no_dist=True)
    reader = StorageReader(tmp_path, step=1)
    metadata = reader.read_metadata().state_dict_metadata
    # Columns, rows, a few rows, nothing, a part of a tensor of one dimension, the whole.
    wanted = [
        ("w", (0, 100), (600, 250)),
        ("w", (300, 0), (300, 500)),
        ("w", (590, 3), (4, 7)),
        ("w", (0, 0), (0, 500)),
        ("b", (1,), (898,)),
        ("w", (0, 0), (600, 500)),
    ]
    targets, items = [], []
    for name, starts, lengths in wanted:
        dtype = torch.float64 if starts == (300, 0) else torch.float32
        targets.append(torch.full(lengths, 7, dtype=dtype, device="cuda"))
        chunk = ChunkStorageMetadata(torch.Size(starts), torch.Size(lengths))
        found = create_read_items_for_chunk_list(name, metadata[name], [chunk])
        place = MetadataIndex(name, torch.Size(starts), len(targets) - 1)
        items += [dataclasses.replace(item, dest_index=place) for item in found]
    if short_of_memory:
        empty = torch.empty

        def none_left(*size: Any, **options: Any) -> torch.Tensor:
            if str(options.get("device", "cpu")).startswith("cuda"):
                raise torch.OutOfMemoryError("no memory left")
            return empty(*size, **options)

        monkeypatch.setattr(torch, "empty", none_left)
    planner = Cut(targets)
    reader.read_data(LoadPlan(items), planner).wait()
    for (name, starts, lengths), target in zip(wanted, targets, strict=True):
        part = tuple(slice(a, a + n) for a, n in zip(starts, lengths, strict=True))
        assert torch.equal(target, stored[name][part].to(target.dtype)), f"{name} {starts}"
    assert sorted(planner.committed) == sorted(planner.place(item) for item in items)
    assert len(items) >= 5
