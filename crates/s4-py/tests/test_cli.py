"""The command ``s4w`` as the wheel installs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import s4weights  # noqa: E402
from s4weights import _cli, _core  # noqa: E402


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "s4weights", *arguments], capture_output=True, text=True, check=False
    )


def state() -> dict[str, object]:
    torch.manual_seed(0)
    weight = torch.randn(300, 400).bfloat16()
    return {"model": {"w": weight, "tied": weight}, "step": 7, "v": torch.randn(5000) ** 2}


def test_a_pt_file_goes_there_and_back(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "a.pt")
    out = run("compress", str(tmp_path / "a.pt"))
    assert out.returncode == 0, out.stderr
    assert "ratio 1." in out.stdout
    out = run("decompress", str(tmp_path / "a.s4w"), str(tmp_path / "b.pt"))
    assert out.returncode == 0, out.stderr
    back = torch.load(tmp_path / "b.pt")
    assert back["step"] == 7
    assert torch.equal(back["model"]["w"].view(torch.int16), state()["model"]["w"].view(torch.int16))
    assert back["model"]["w"].data_ptr() == back["model"]["tied"].data_ptr()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt", "a.s4w", "b.pt"]


def test_inspect_and_verify_are_the_native_program(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "a.pt")
    assert run("compress", str(tmp_path / "a.pt")).returncode == 0
    file = tmp_path / "a.s4w"
    report = json.loads(run("inspect", "--bits", "--json", str(file)).stdout)
    assert {t["name"] for t in report["tensors"]} == {"model.w", "v"}
    assert run("verify", str(file)).returncode == 0
    data = bytearray(file.read_bytes())
    data[2000] ^= 1
    file.write_bytes(data)
    out = run("verify", str(file))
    assert out.returncode == 1
    assert "model.w" in out.stderr
    assert run("verify", str(tmp_path / "none.s4w")).returncode == 3
    assert run("nonsense").returncode == 2


def test_trust_is_for_reading_and_what_cannot_be_read_has_a_code_of_its_own(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "a.pt")
    (source, file, back) = (str(tmp_path / name) for name in ("a.pt", "a.s4w", "b.pt"))
    assert run("compress", source, "--trusted").returncode == 2
    assert run("compress", source).returncode == 0
    # No codec of it is closed: trust changes nothing.
    assert run("decompress", file, back, "--trusted").returncode == 0
    assert torch.load(back)["step"] == 7
    assert run("decompress", file, back, "--fast").returncode == 2
    data = bytearray(Path(file).read_bytes())
    data[10] = 77
    Path(file).write_bytes(data)
    out = run("decompress", file, back, "--trusted")
    assert out.returncode == 4
    assert "format 0.77" in out.stderr


def test_an_unsafe_pickle_is_refused(tmp_path: Path) -> None:
    torch.save({"run": subprocess.run}, tmp_path / "a.pt")
    out = run("compress", str(tmp_path / "a.pt"))
    assert out.returncode == 1
    assert "Weights only load failed" in out.stderr
    assert not (tmp_path / "a.s4w").exists()


def test_tensors_are_compressed_in_memory() -> None:
    weight = torch.randn(100_000).bfloat16()
    for simd in (None, "scalar"):
        codec = _core.TensorCodec("fast", 1, simd)
        packed = codec.compress(weight.data_ptr(), 200_000, "bfloat16", (100_000,))
        assert 100_000 < len(packed) < 150_000
        back = torch.zeros_like(weight)
        codec.decompress(packed, back.data_ptr(), 200_000)
        assert torch.equal(back.view(torch.int16), weight.view(torch.int16))
        with pytest.raises(ValueError, match="buffer"):
            codec.decompress(packed, back.data_ptr(), 100)
    with pytest.raises(ValueError, match="instruction set"):
        _core.TensorCodec("fast", 1, "mmx")


def test_options_do_not_reach_pickles(capsys: pytest.CaptureFixture[str]) -> None:
    assert _cli.main(["compress", "--simd", "avx2", "x.pt"]) == 2
    assert "default options" in capsys.readouterr().err


def test_a_checkpoint_of_a_store_becomes_a_pt_file(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    entry = s4weights.save_checkpoint(state(), url, 5)
    target = str(tmp_path / "c.pt")
    for which in ("5", "latest", entry.id):
        out = run("store", "restore", url, which, target, "-q")
        assert out.returncode == 0, out.stderr
        back = torch.load(target)
        assert torch.equal(back["v"], state()["v"])
        (tmp_path / "c.pt").unlink()
    out = run("store", "restore", url, "6", target)
    assert out.returncode == 3
    assert "step 6" in out.stderr
    assert run("store", "restore", url, target).returncode == 2
    out = run("store", "restore", "-o", "=hush", url, "5", target)
    assert out.returncode == 2
    assert "hush" not in out.stderr
    # What is no PyTorch file is the native program's matter.
    assert run("store", "restore", url, "5", str(tmp_path / "c.s4w")).returncode == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.s4w", "store"]
