"""`patch`: unmodified programs that call `torch.save` and `torch.load`."""

import functools
import io
import subprocess
import sys

import pytest
import torch

import s4weights
from compare import assert_identical


def is_s4w(path):
    return path.read_bytes()[:4] == b"\x89S4W"


def state():
    torch.manual_seed(1)
    return {"w": torch.randn(64, 32), "step": 7}


def test_a_program_saves_and_loads_s4w_files(tmp_path):
    path, old = tmp_path / "checkpoint.pt", tmp_path / "old.pt"
    torch.save(state(), old)
    before = (torch.save, torch.load, torch.serialization.save, torch.serialization.load)
    with s4weights.patch(preset="fast", threads=1):
        assert torch.save(state(), path) is None
        assert is_s4w(path)
        assert_identical(torch.load(path, map_location="cpu", weights_only=True), state())
        # Files of torch.save are still read.
        assert_identical(torch.load(old), state())
    assert (torch.save, torch.load, torch.serialization.save, torch.serialization.load) == before


def test_what_pytorch_itself_saves_keeps_its_format(tmp_path):
    """Pickles of tensors, exported programs and distributed checkpoints are read without us."""
    import pickle

    import torch.distributed.checkpoint as dcp

    linear = torch.nn.Linear(4, 4)
    program = torch.export.export(linear, (torch.rand(1, 4),))
    with s4weights.patch():
        pickled = pickle.dumps(state())
        torch.export.save(program, tmp_path / "a.pt2")
        dcp.save({"w": torch.arange(9.0), "x": {"y": [1]}}, checkpoint_id=tmp_path / "dcp")
    assert_identical(pickle.loads(pickled), state())
    exported = torch.export.load(tmp_path / "a.pt2").state_dict
    assert torch.equal(exported["weight"], linear.weight)
    loaded = {"w": torch.zeros(9), "x": {"y": [0]}}
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp")
    assert loaded["w"].tolist() == [*range(9)] and loaded["x"] == {"y": [1]}


def test_our_save_in_the_place_of_pytorchs(tmp_path, monkeypatch):
    import pickle

    monkeypatch.setattr(torch, "save", s4weights.save)
    torch.save(state(), tmp_path / "a")
    pickled = pickle.dumps(state())
    monkeypatch.undo()
    assert is_s4w(tmp_path / "a")
    assert_identical(pickle.loads(pickled), state())


def test_our_save_called_through_pytorch(tmp_path):
    """It was asked for by name, whoever passes the call on."""
    torch.no_grad()(s4weights.save)(state(), tmp_path / "a")
    assert is_s4w(tmp_path / "a")


def test_patches_nest_and_are_taken_back_in_turn(tmp_path):
    before = torch.save
    s4weights.patch()
    once = torch.save
    s4weights.patch(preset="fast")
    torch.save(state(), tmp_path / "a")
    assert_identical(torch.load(tmp_path / "a"), state())
    s4weights.unpatch()
    assert torch.save is once
    s4weights.unpatch()
    assert torch.save is before
    s4weights.unpatch()
    assert torch.save is before


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'presett'"):
        s4weights.patch(presett="fast")
    for wrong in ({"device": "tpu"}, {"gpu_scratch": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            s4weights.patch(**wrong)
    assert not hasattr(torch.save, "__wrapped__")


def test_a_patch_does_not_start_cuda(monkeypatch):
    # Processes that are forked later could not use it.
    monkeypatch.setattr(s4weights._device, "_engine", lambda scratch: pytest.fail("started"))
    with s4weights.patch(device="cuda"):
        pass


def test_a_block_that_fails_takes_the_patch_back():
    before = torch.save
    with pytest.raises(ZeroDivisionError), s4weights.patch():
        1 / 0  # noqa: B018
    assert torch.save is before


def test_what_torch_alone_can_write_goes_to_torch(tmp_path):
    path = tmp_path / "skipped"
    with s4weights.patch(), torch.serialization.skip_data():
        torch.save(state(), path)
    assert not is_s4w(path)


def test_functions_that_were_assigned_by_hand_do_not_call_themselves(tmp_path, monkeypatch):
    path = tmp_path / "old.pt"
    torch.save(state(), path)
    monkeypatch.setattr(torch, "load", s4weights.load)
    assert_identical(torch.load(path), state())
    with s4weights.patch():
        assert_identical(torch.load(path), state())
    monkeypatch.setattr(torch.serialization, "load", s4weights.load)
    with pytest.raises(RuntimeError, match=r"use s4weights\.patch\(\) to keep it"):
        torch.load(path)


def test_functions_that_wrap_ours_do_not_call_themselves(tmp_path, monkeypatch):
    path = tmp_path / "old.pt"
    torch.save(state(), path)
    wrapped = functools.partial(s4weights.load, weights_only=True)
    monkeypatch.setattr(torch, "load", wrapped)
    assert_identical(torch.load(path), state())
    monkeypatch.setattr(torch.serialization, "load", wrapped)
    with pytest.raises(RuntimeError, match=r"use s4weights\.patch\(\) to keep it"):
        torch.load(path)


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: lambda *args: f(*args)])
def test_a_save_that_was_assigned_by_hand_writes_files_without_data_too(
    wrap, tmp_path, monkeypatch
):
    path = tmp_path / "skipped"
    monkeypatch.setattr(torch, "save", wrap(s4weights.save))
    with torch.serialization.skip_data():
        torch.save(state(), path)
    assert not is_s4w(path)
    torch.save(state(), path)
    assert is_s4w(path)


def test_what_a_file_would_need_is_told_of_both_formats(tmp_path):
    obj = {"a": torch.ones(2), "b": slice(1)}
    for save, name in ((s4weights.save, "ours"), (torch.save, "theirs")):
        path = tmp_path / name
        save(obj, path)
        with s4weights.patch():
            assert torch.serialization.get_unsafe_globals_in_checkpoint(path) == ["builtins.slice"]
    with pytest.raises(ValueError, match=r"torch\.save"):
        torch.serialization.get_unsafe_globals_in_checkpoint(tmp_path / "ours")


TRAINING = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
start = 0
if len(sys.argv) > 2:
    checkpoint = torch.load(sys.argv[2], weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    torch.set_rng_state(checkpoint["rng"])
    start = checkpoint["epoch"]
for epoch in range(start, 4):
    loss = model(torch.randn(16, 32)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if epoch == 1 or epoch == 3:
        torch.save(
            {
                "epoch": epoch + 1,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "rng": torch.get_rng_state(),
            },
            f"{sys.argv[1]}/{epoch}.pt",
        )
"""


def test_an_unmodified_script_trains_stops_and_resumes_to_the_bit(tmp_path):
    script, run = tmp_path / "train.py", "import s4weights, runpy, sys; s4weights.patch(); \
sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    script.write_text(TRAINING)
    plain, ours, resumed = (tmp_path / name for name in ("plain", "ours", "resumed"))
    for folder in (plain, ours, resumed):
        folder.mkdir()
    python = [sys.executable]
    subprocess.run([*python, script, plain], check=True)
    subprocess.run([*python, "-c", run, script, ours], check=True)
    subprocess.run([*python, "-c", run, script, resumed, ours / "1.pt"], check=True)
    assert is_s4w(ours / "3.pt")
    expected = torch.load(plain / "3.pt", weights_only=True)
    assert_identical(s4weights.load(ours / "3.pt"), expected)
    assert_identical(s4weights.load(resumed / "3.pt"), expected)


def test_streams_are_patched_too():
    with s4weights.patch():
        buffer = io.BytesIO()
        torch.save(state(), buffer)
        buffer.seek(0)
        assert_identical(torch.load(buffer), state())


def test_a_block_takes_back_its_own_patch():
    before = torch.save
    outer = s4weights.patch(preset="fast")
    once = torch.save
    with s4weights.patch():
        s4weights.unpatch()
        assert torch.save is once
    assert torch.save is once
    # The outer one ends first.
    with s4weights.patch():
        inner = torch.save
        with outer:
            pass
        assert torch.save is inner
    assert torch.save is before
    s4weights.unpatch()
    assert torch.save is before
