"""The command ``s4w`` as the wheel installs it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

import s4weights  # noqa: E402
from s4weights import _cli, _core  # noqa: E402


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "s4weights", *arguments], capture_output=True, text=True, check=False
    )


def main(*arguments: str) -> tuple[int, str]:
    """Runs a command that does not reach the native program in this process: exit code, output."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = _cli.main(list(arguments))
    return code, said.getvalue()


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
    assert torch.equal(
        back["model"]["w"].view(torch.int16), state()["model"]["w"].view(torch.int16)
    )
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
    # The file uses no closed codec, so trust changes nothing.
    assert run("decompress", file, back, "--trusted").returncode == 0
    assert torch.load(back)["step"] == 7
    Path(back).unlink()
    assert run("decompress", file, back, "--fast").returncode == 2
    data = bytearray(Path(file).read_bytes())
    data[10] = 77
    Path(file).write_bytes(data)
    out = run("decompress", file, back, "--trusted")
    assert out.returncode == 4
    assert "format 0.77" in out.stderr


def test_more_than_tensors_is_refused_with_the_way_to_do_it(tmp_path: Path) -> None:
    torch.save({"run": subprocess.run}, tmp_path / "a.pt")
    module = torch.nn.Linear(2, 2)
    torch.save(module, tmp_path / "module.pt")
    torch.save([module], tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save({"a": torch.ones(2)}, tmp_path / "new.pt", pickle_protocol=4)
    cases = {
        "a.pt": "`run` needs `subprocess.run`",
        "module.pt": "the saved object needs `torch.nn.modules.linear.Linear`",
        "old.pt": "needs `torch.nn.modules.linear.Linear`",
        "new.pt": "Unsupported operand",
    }
    for name, what in cases.items():
        source = str(tmp_path / name)
        code, said = main("compress", source, str(tmp_path / "o.s4w"))
        assert code == 4 and what in said, said
        # PyTorch's advice to its own callers does not apply to this program.
        assert f"s4weights.save(torch.load({source!r}, weights_only=False)" in said
        assert "\x1b" not in said and "two options" not in said
    assert not (tmp_path / "o.s4w").exists()
    # The same on the way back.
    s4weights.save(module, tmp_path / "module.s4w")
    code, said = main("decompress", str(tmp_path / "module.s4w"), str(tmp_path / "b.pt"))
    assert code == 4 and "s4weights.load(" in said and "Linear" in said, said
    s4weights.save_checkpoint(module, str(tmp_path / "store"), 1)
    code, said = main("store", "restore", str(tmp_path / "store"), "1", str(tmp_path / "b.pt"))
    assert code == 4 and "s4weights.load_checkpoint(" in said and "Linear" in said, said
    assert not (tmp_path / "b.pt").exists()


def test_sound_files_of_other_formats_are_not_called_damaged(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "a.pt")
    torch.save(state(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated.
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "jit.pt")
    s4weights.save(state(), tmp_path / "ours.pt")
    save_file({"w": torch.ones(3)}, tmp_path / "theirs.bin")
    (tmp_path / "plain.ckpt").write_bytes(pickle.dumps({"a": 1}))
    output = str(tmp_path / "o.s4w")
    cases = {
        "jit.pt": "torch.jit.load",
        "ours.pt": "is already a .s4w file",
        "theirs.bin": "is a safetensors file",
        "plain.ckpt": "is a pickle, but was not written by torch.save",
    }
    for name, what in cases.items():
        code, said = main("compress", str(tmp_path / name), output, "-q")
        assert code == 4 and what in said and name in said, said
        assert len(said.splitlines()) == 1, said
    for name in ("a.pt", "old.pt", "theirs.bin"):
        code, said = main("decompress", str(tmp_path / name), str(tmp_path / "o.pt"))
        assert code == 4 and "not a .s4w file" in said and name in said, said
    # Damaged files are.
    whole, old = (tmp_path / "a.pt").read_bytes(), (tmp_path / "old.pt").read_bytes()
    for number, data in enumerate([whole[:3000], old[:200], b"junk" * 9, b"", bytes(1000)]):
        (tmp_path / f"{number}.pt").write_bytes(data)
        code, said = main("compress", str(tmp_path / f"{number}.pt"), output)
        assert code == 1 and "damaged" in said and f"{number}.pt" in said, (number, said)
    assert not Path(output).exists()


def test_nothing_is_written_over_its_input(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(state(), "a.pt")
    shutil.copy("a.pt", "ours.pt")
    assert main("compress", "a.pt")[0] == 0
    shutil.copy("a.s4w", "ours.pt")
    os.symlink("a.pt", "soft.pt")
    os.link("a.pt", "hard.pt")
    (tmp_path / "sub").mkdir()
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    url = (tmp_path / "a.pt").as_uri()
    for same in (
        "a.pt",
        "./a.pt",
        "sub/../a.pt",
        str(tmp_path / "a.pt"),
        "soft.pt",
        "hard.pt",
        url,
    ):
        code, said = main("compress", "a.pt", same, "--force")
        assert code == 2 and "the same file" in said, (same, said)
    assert main("decompress", "ours.pt", "ours.pt", "-f")[0] == 2
    # The default output would be the same file.
    assert main("decompress", "ours.pt", "-f")[0] == 2
    assert main("compress", "sub", "sub/", "-f")[0] == 2
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before


def test_what_is_there_is_replaced_only_by_force(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "a.pt")
    assert main("compress", str(tmp_path / "a.pt"))[0] == 0
    s4weights.save_checkpoint(state(), str(tmp_path / "store"), 1)
    source, file = str(tmp_path / "a.pt"), str(tmp_path / "a.s4w")
    target = tmp_path / "mine.pt"
    verbs = [
        (("compress", source), tmp_path / "mine.s4w"),
        (("decompress", file), target),
        (("store", "restore", str(tmp_path / "store"), "1"), target),
    ]
    for verb, output in verbs:
        output.write_text("mine")
        output.chmod(0o640)
        code, said = main(*verb, str(output))
        assert code == 5 and str(output) in said and "--force" in said, said
        assert output.read_text() == "mine"
        for force in ("-f", "-qf", "--force"):
            code, said = main(*verb, str(output), force)
            assert code == 0, said
        assert s4weights.load(output)["step"] == 7
        assert output.stat().st_mode & 0o777 == 0o640
    assert main("compress", source, (tmp_path / "mine.s4w").as_uri())[0] == 5
    # The default output is no exception.
    assert main("compress", source)[0] == main("decompress", file)[0] == 5
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "a.pt",
        "a.s4w",
        "mine.pt",
        "mine.s4w",
        "store",
    ]


def test_what_tensors_alone_cannot_hold_is_written_to_a_pt_file(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "a.pt")
    assert main("compress", str(tmp_path / "a.pt"))[0] == 0
    (tmp_path / "a.pt").unlink()
    file = str(tmp_path / "a.s4w")
    code, said = main("decompress", file)
    assert code == 0 and "a.pt" in said, said
    assert torch.load(tmp_path / "a.pt")["step"] == 7
    # A file for tensors alone is written, with a warning about what is missing.
    out = run("decompress", file, str(tmp_path / "a.safetensors"))
    assert out.returncode == 0
    assert "1 value that is not a tensor" in out.stderr
    assert "1 tensor that shares its values" in out.stderr
    assert load_file(tmp_path / "a.safetensors").keys() == {"model.w", "v"}
    # A former .safetensors file becomes one again.
    save_file({"w": torch.ones(3)}, tmp_path / "t.safetensors")
    assert run("compress", str(tmp_path / "t.safetensors")).returncode == 0
    (tmp_path / "t.safetensors").unlink()
    assert run("decompress", str(tmp_path / "t.s4w")).returncode == 0
    assert (tmp_path / "t.safetensors").exists() and not (tmp_path / "t.pt").exists()
    # An unknown extension is refused, as by `store restore`.
    code, said = main("decompress", file, str(tmp_path / "b.xyz"))
    assert code == 4
    assert not (tmp_path / "b.xyz").exists()


def test_the_output_is_blamed_for_what_is_wrong_with_it(tmp_path: Path) -> None:
    s4weights.save(state(), tmp_path / "a.s4w")
    file = str(tmp_path / "a.s4w")
    s4weights.save_checkpoint(state(), str(tmp_path / "store"), 1)
    (tmp_path / "folder.pt").mkdir()
    targets = [str(tmp_path / "no" / "x.pt"), str(tmp_path / "folder.pt"), f"{file}/x.pt"]
    for target in targets:
        for verb in (("decompress", file), ("store", "restore", str(tmp_path / "store"), "1")):
            code, said = main(*verb, target)
            assert code == 3 and said.startswith(f"s4w: {target}: "), said
    for url in ("s3://bucket/x.pt",):
        code, said = main("decompress", file, url, "--force")
        assert code == 4 and "not to a URL" in said, said
    code, said = main("decompress", str(tmp_path / "none.s4w"), str(tmp_path / "x.pt"))
    assert code == 3 and "none.s4w" in said
    code, said = main("compress", str(tmp_path / "none.pt"))
    assert code == 3 and "none.pt" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.s4w", "folder.pt", "store"]


def test_a_full_drive_is_the_output_s_matter(tmp_path: Path, monkeypatch: Any) -> None:
    s4weights.save(state(), tmp_path / "a.s4w")

    def fail(error: Exception) -> Any:
        def save(obj: object, file: Any) -> None:
            file.write(b"half")
            raise error

        return save

    target = str(tmp_path / "b.pt")
    for error in (OSError(28, "No space left on device"), RuntimeError("[enforce fail at x] . y")):
        monkeypatch.setattr(torch, "save", fail(error))
        code, said = main("decompress", str(tmp_path / "a.s4w"), target)
        assert code == 3 and said.startswith(f"s4w: {target}: "), said
        assert sorted(p.name for p in tmp_path.iterdir()) == ["a.s4w"]


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize(("is_there", "force"), [(True, False), (True, True), (False, False)])
def test_what_appears_meanwhile_is_replaced_only_by_force(
    tmp_path: Path, monkeypatch: Any, links: bool, is_there: bool, force: bool
) -> None:
    s4weights.save(state(), tmp_path / "a.s4w")
    save, target = torch.save, tmp_path / "b.pt"

    def slow(*values: Any) -> None:
        save(*values)
        if is_there:
            target.write_bytes(b"mine")

    def no_link(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(torch, "save", slow)
    if not links:
        monkeypatch.setattr(os, "link", no_link)
    flags = ["--force"] if force else []
    code, said = main("decompress", *flags, str(tmp_path / "a.s4w"), str(target))
    assert code == (5 if is_there and not force else 0), said
    assert (target.read_bytes() == b"mine") == (code == 5)
    assert code == 0 or said == f"s4w: {target} exists already; --force replaces it\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.s4w", "b.pt"]


def test_too_little_memory_is_no_damage(tmp_path: Path, monkeypatch: Any) -> None:
    torch.save(state(), tmp_path / "a.pt")
    s4weights.save(state(), tmp_path / "b.s4w")
    size = (tmp_path / "a.pt").stat().st_size

    def fail(needed: int) -> Any:
        def call(*_: Any, **__: Any) -> None:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
                f"tried to allocate {needed} bytes. Error code 12 (Cannot allocate memory)"
            )

        return call

    # A sound file has the bytes of all its tensors.
    for needed, expected in ((size, 6), (1 << 60, 1)):
        monkeypatch.setattr(torch, "load", fail(needed))
        code, said = main("compress", str(tmp_path / "a.pt"), str(tmp_path / "a.s4w"))
        assert code == expected and ("damaged" in said) == (expected == 1), said
        assert ("not enough memory" in said) == (expected == 6), said
    monkeypatch.setattr(torch, "save", fail(9))
    code, said = main("decompress", str(tmp_path / "b.s4w"), str(tmp_path / "b.pt"))
    assert code == 6 and "not enough memory" in said, said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt", "b.s4w"]


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


def test_options_of_pickles_are_those_that_have_an_effect(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "a.pt")
    source, file = str(tmp_path / "a.pt"), str(tmp_path / "o.s4w")
    # Options may be anywhere, and the value of an option is not taken for a file.
    code, said = main("-q", "compress", "--preset", "fast", source, "--threads=1", "--", file)
    assert code == 0, said
    assert s4weights.inspect(file)["preset"] == "fast"
    assert main("decompress", "--threads", "1", file, str(tmp_path / "b.pt"))[0] == 0
    for wrong in (
        ["compress", "--simd", "avx2", source],
        ["compress", source, "--trusted"],
        ["compress", source, file, "more"],
        ["compress", "--preset", "huge", source],
        ["compress", "--threads", "many", source],
        ["compress", "--threads", "0", source],
        ["decompress", "--preset", "fast", file, str(tmp_path / "c.pt")],
        ["store", "restore", "x", "newest", str(tmp_path / "c.pt")],
    ):
        code, said = main(*wrong)
        assert code == 2 and said.startswith("s4w: "), (wrong, said)
    code, said = main("compress", source, "--secret=hush")
    assert code == 2 and "hush" not in said
    assert "Usage" in run("compress", "--help", source).stdout


def test_names_do_not_reach_the_terminal_as_orders(tmp_path: Path) -> None:
    code, said = main("compress", str(tmp_path / "\x1b[31mred.pt"))
    assert code == 3 and "\\u{1b}[31mred.pt" in said and "\x1b" not in said


def test_messages_hold_no_secrets_of_urls(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "a.pt")
    torch.save({"path": tmp_path}, tmp_path / "unsafe.pt")
    url = "s3://me:hush@127.0.0.1:9/a/b.s4w?X-Amz-Signature=hush"
    for line in (
        ["decompress", url, str(tmp_path / "b.pt")],
        ["compress", str(tmp_path / "a.pt"), url],
        # The message contains the call that would save it, with the URL.
        ["compress", str(tmp_path / "unsafe.pt"), url],
        ["store", "restore", url, "latest", str(tmp_path / "b.pt")],
    ):
        code, said = main(*line)
        assert code != 0 and "127.0.0.1" in said, (line, said)
        assert "hush" not in said, (line, said)


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
    code, said = main("store", "restore", url, "00000000-0000-7000-8000-000000000000", target)
    assert code == 3 and "no checkpoint" in said
    # Other formats are left to the native program.
    assert run("store", "restore", url, "5", str(tmp_path / "c.s4w")).returncode == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.s4w", "store"]


def test_what_a_damaged_log_proves_becomes_a_pt_file(tmp_path: Path) -> None:
    url = tmp_path / "store"
    for step in range(3):
        s4weights.save_checkpoint({"step": step}, str(url), step)
    max((url / "log").iterdir()).write_bytes(b"")
    out = run("store", "restore", str(url), "latest", str(tmp_path / "c.pt"))
    assert out.returncode == 0, out.stderr
    assert "damaged" in out.stderr
    assert torch.load(tmp_path / "c.pt")["step"] == 1
    code, said = main("store", "restore", str(tmp_path / "none"), "1", str(tmp_path / "d.pt"))
    assert code == 3 and "no checkpoint store" in said, said


def test_without_pytorch_it_is_asked_for(tmp_path: Path, monkeypatch: Any) -> None:
    s4weights.save(state(), tmp_path / "a.s4w")
    torch.save(state(), tmp_path / "b.pt")
    monkeypatch.delitem(sys.modules, "s4weights._cli_torch", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    for words in (("compress", "b.pt"), ("decompress", "a.s4w", "c.pt")):
        verb, *names = words
        code, said = main(verb, *(str(tmp_path / name) for name in names))
        assert code == 4 and "pip install torch" in said, said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.s4w", "b.pt"]


@pytest.mark.skipif(os.name == "nt", reason="names are text there")
def test_names_that_are_no_text_are_told_so(tmp_path: Path) -> None:
    command = [os.fsencode(sys.executable), b"-m", b"s4weights"]
    torch.save(state(), os.fsdecode(os.fsencode(tmp_path) + b"/\xff.pt"))
    for words in ([b"inspect", b"\xff.s4w"], [b"compress", os.fsencode(tmp_path) + b"/\xff.pt"]):
        out = subprocess.run([*command, *words], capture_output=True, check=False)
        assert out.returncode == 2, out.stderr
        shown = words[1].decode(errors="replace").encode()
        assert b"s4w: argument 2 (`%s`) is not text: UTF-8 is expected" % shown in out.stderr
    # Possible secrets are not repeated.
    words = [b"store", b"ls", b"s3://b/x?sig=hush\xff", b"-o", b"secret=hush\xff"]
    out = subprocess.run([*command, *words], capture_output=True, check=False)
    assert b"argument 3 (`s3://b/x`), argument 5 (`secret`)" in out.stderr, out.stderr
    assert b"hush" not in out.stderr


def test_a_dash_is_no_file_name(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(state(), "a.pt")
    for line in (["compress", "a.pt", "-"], ["decompress", "-", "b.pt"]):
        code, said = main(*line)
        assert code == 2 and "standard input and output are not supported" in said, (line, said)
    assert os.listdir() == ["a.pt"]
    assert main("compress", "a.pt", "./-")[0] == 0 and os.path.isfile("-")


def test_the_service_is_said_to_be_elsewhere() -> None:
    for words in (["serve"], ["serve", "--store", "x"]):
        out = run(*words)
        assert out.returncode == 4 and "s4weights-runner" in out.stderr, out.stderr
        assert "store'" not in out.stderr


def test_what_is_logged_is_what_was_asked_for(tmp_path: Path, monkeypatch: Any) -> None:
    store = tmp_path / "store"
    with s4weights.CheckpointStore(store) as opened:
        opened.save_checkpoint(state(), 1)
    (store / "logck").write_bytes(b"damaged")
    restore = ("store", "restore", str(store), "1", "--force")
    # One that is native, one that is not, and one for which the store is opened twice.
    verbs = [
        ("store", "verify", str(store)),
        (*restore, str(tmp_path / "a.pt")),
        (*restore, str(tmp_path / "a.safetensors")),
    ]

    def logged(*flags: str, variable: str = "") -> list[list[str]]:
        monkeypatch.setenv("S4_LOG", variable)
        ran = [run(*verb, *flags) for verb in verbs]
        assert [out.returncode for out in ran] == [0, 0, 0], ran
        lines = [out.stderr.splitlines() for out in ran]
        return [[line for line in said if not line.startswith("s4w: warning: ")] for said in lines]

    plain = " WARN the stored view is unusable: replaying the log"
    for said in [*logged(), *logged(variable="warn")]:
        assert len(said) == 1 and said[0].startswith(plain), said
    for said in logged("-v", variable="off"):
        assert said[0].startswith(plain) and all(line.startswith(" INFO ") for line in said[1:]), said
    for said in [*logged("-vv"), *logged(variable="DEBUG")]:
        assert any(line.startswith(" WARN s4weights.store.view: the stored view") for line in said)
    assert logged("--quiet") == logged(variable="off") == logged(variable="error") == [[], [], []]
    monkeypatch.setenv("S4_LOG", "loud")
    for verb in verbs:
        out = run(*verb)
        assert out.returncode == 2 and out.stderr.startswith("s4w: S4_LOG: expected `off`, `error`"), out


#: Runs the command line, and sends this process a signal when PyTorch has half written a file or begins to read one.
SIGNALLED = """
import os, signal, sys, time, torch
from s4weights._cli import main

number = getattr(signal, sys.argv[1])

def load(*_, **__):
    os.kill(os.getpid(), number)
    time.sleep(60)

def save(_, file):
    file.write(b"half")
    # PyTorch's writer, too, raises an error of its own if writing to its file raises one.
    try:
        load()
    finally:
        raise RuntimeError("enforce fail: unexpected pos")

torch.load, torch.save = load, save
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_leaves_nothing_half_written(tmp_path: Path, name: str) -> None:
    torch.save(state(), tmp_path / "a.pt")
    assert run("compress", str(tmp_path / "a.pt")).returncode == 0
    for verb, source in [("compress", "a.pt"), ("decompress", "a.s4w")]:
        target = str(tmp_path / ("b.s4w" if verb == "compress" else "b.pt"))
        out = subprocess.run(
            [sys.executable, "-c", SIGNALLED, name, verb, str(tmp_path / source), target],
            capture_output=True,
            text=True,
            # If tests run in the background, some signals may be ignored.
            preexec_fn=lambda: signal.signal(getattr(signal, name), signal.SIG_DFL),
        )
        assert (out.returncode, out.stderr) == (128 + getattr(signal, name), "s4w: interrupted\n")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt", "a.s4w"]
