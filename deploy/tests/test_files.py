"""The unit, the image's build, its gate, the batch script and the pods: what each must say and do."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from template import DEPLOY

UNIT = DEPLOY / "systemd" / "s4w-runner.service"
PROGRAMS = [*sorted((DEPLOY / "ami").glob("*.sh")), DEPLOY / "slurm" / "train.sbatch"]
MAINTAINER = sorted((DEPLOY / "deb").iterdir())


def setting(name: str, text: str | None = None) -> list[str]:
    return re.findall(rf"(?m)^{name}=(.*)$", UNIT.read_text() if text is None else text)


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


# The unit.


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text()
    for program in ("/usr/bin/s4w", "/usr/bin/nvidia-modprobe"):
        assert program in text
        text = text.replace(program, "/bin/true")
    unit = tmp_path / UNIT.name
    unit.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    unit.write_text(text.replace("Type=notify", "Type=nonsense"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True
    )
    assert done.returncode != 0 or done.stderr


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd")
def test_the_sandbox_is_tight(tmp_path: Path) -> None:
    def exposure(text: str) -> int:
        unit = tmp_path / UNIT.name
        unit.write_text(text)
        command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(unit)]
        found = subprocess.run(command, capture_output=True, text=True)
        if "unrecognized option" in found.stderr:
            pytest.skip("this systemd does not look at files")
        return found.returncode

    assert exposure(UNIT.read_text()) == 0
    loose = re.sub(r"(?m)^(Protect|Restrict[A-Z]|SystemCall|Capability).*$", "", UNIT.read_text())
    assert exposure(loose) != 0


def test_the_service_fits_into_the_notice_of_a_spot_instance() -> None:
    (drain,) = re.findall(
        r"(?m)^drain_seconds = (\d+)$", (DEPLOY / "systemd/runner.toml").read_text()
    )
    stop = seconds(setting("TimeoutStopSec")[0])
    assert int(drain) + 5 < stop < 120
    assert setting("Type") == ["notify"]
    assert setting("RestartPreventExitStatus") == ["77 78"]
    assert seconds(setting("WatchdogSec")[0]) >= 120


def test_the_gpu_and_other_users_are_visible_in_the_sandbox() -> None:
    assert setting("DevicePolicy") == ["closed"] and setting("DeviceAllow") == ["char-nvidia* rw"]
    # With user namespaces of its own the kernel would call every trainer `nobody`.
    for forbidden in ("PrivateDevices", "PrivateUsers", "ProcSubset", "MemoryDenyWriteExecute"):
        assert not setting(forbidden), forbidden
    assert setting("User") == ["s4weights"] and not setting("DynamicUser")
    users = (DEPLOY / "systemd/s4weights.sysusers").read_text()
    assert re.search(r"(?m)^u s4weights ", users)


def test_folders_for_trainers_have_the_modes_that_the_sandbox_forbids_to_set() -> None:
    assert setting("RestrictSUIDSGID") == ["yes"]
    text = (DEPLOY / "systemd/s4weights.tmpfiles").read_text()
    modes = dict(re.findall(r"(?m)^d (\S+) (\d+) s4weights s4weights -$", text))
    assert modes["/var/lib/s4weights/staging/incoming"] == "3770"
    assert modes["/var/lib/s4weights/staging/restored"] == "2770"


# The image.


def provisioners() -> list[dict[str, Any]]:
    hcl2 = pytest.importorskip("hcl2")
    with (DEPLOY / "ami" / "runner.pkr.hcl").open() as file:
        build = hcl2.load(file)["build"][0]
    return [body for step in build["provisioner"] for body in step.values()]


def script_of(step: dict[str, Any]) -> str:
    return Path(str(step.get("script", "")).strip('"')).name


def test_the_gate_sees_what_is_snapshotted() -> None:
    steps = provisioners()
    names = [
        script_of(s) or ("reboot" if "reboot" in str(s.get("inline")) else "copy") for s in steps
    ]
    order = [
        "install-driver.sh",
        "reboot",
        "copy",
        "copy",
        "install-runner.sh",
        "gate.sh",
        "scrub.sh",
    ]
    assert names == order
    for step in steps:
        assert "valid_exit_codes" not in step
        assert "true" not in str(step.get("execute_command", ""))
    for name in {n for n in names if n.endswith(".sh")}:
        assert (DEPLOY / "ami" / name).exists()


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: p.name)
def test_scripts_stop_at_the_first_failure(path: Path) -> None:
    text = path.read_text()
    assert "set -euo pipefail" in text
    if path.parent.name == "ami":
        assert "|| true" not in text
    assert os.access(path, os.X_OK)


@pytest.mark.parametrize("path", [*PROGRAMS, *MAINTAINER], ids=lambda p: p.name)
def test_shellcheck_finds_nothing(path: Path) -> None:
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("needs shellcheck")
    done = subprocess.run([program, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def run_gate(tmp_path: Path, **how: Any) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Runs the gate with stand-ins for the program and for the machine's own."""
    bin = tmp_path / "bin"
    bin.mkdir()
    codes = {"selftest": 0, "sandboxed": 0, "fault": 1, "gpu": "NVIDIA L4, 580.1, 23034 MiB", **how}
    stubs = {
        "s4w": f"""
case "$*" in
  --version) echo "s4w 0.1.0" ;;
  *--inject-fault*) exit {codes["fault"]} ;;
  selftest*--require-gpu*) echo vectors; exit "${{SANDBOX:-{codes["selftest"]}}}" ;;
  *) exit 99 ;;
esac""",
        "nvidia-smi": f'[ -n "{codes["gpu"]}" ] || exit 9; echo "{codes["gpu"]}"',
        "systemd-run": f"""
echo "$@" > {tmp_path}/sandbox
while [ "$1" != -- ]; do shift; done; shift
SANDBOX={codes["sandboxed"]} exec "$@" """,
    }
    for name, body in stubs.items():
        (bin / name).write_text(f"#!/bin/bash\n{body}\n")
        (bin / name).chmod(0o755)
    if codes["gpu"] is None:
        (bin / "nvidia-smi").unlink()
    attestation = tmp_path / "share" / "attestation.json"
    done = subprocess.run(
        ["bash", str(DEPLOY / "ami" / "gate.sh"), str(bin / "s4w")],
        env={
            "PATH": f"{bin}:/usr/bin:/bin",
            "ATTESTATION": str(attestation),
            "UNIT": str(UNIT),
            "COMMIT": 'abc"123',
        },
        capture_output=True,
        text=True,
    )
    return done, attestation


def test_the_gate_attests_what_it_saw(tmp_path: Path) -> None:
    done, attestation = run_gate(tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(attestation.read_text())
    assert found["gpu"].startswith("NVIDIA L4") and found["commit"] == 'abc"123'
    assert found["sandboxed"] is found["fault_noticed"] is True
    assert re.fullmatch("[0-9a-f]{64}", found["selftest_sha256"])
    sandbox = (tmp_path / "sandbox").read_text()
    for property in ("User=s4weights", "DevicePolicy=closed", "ProtectSystem=strict"):
        assert f"--property={property}" in sandbox
    assert "Restart=" not in sandbox


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"gpu": None}, "no nvidia-smi"),
        ({"gpu": ""}, "no GPU"),
        ({"selftest": 1}, "the self-test failed"),
        ({"sandboxed": 1}, "within the service's sandbox"),
        ({"fault": 0}, "was not noticed"),
        ({"fault": 4}, "was not noticed"),
    ],
)
def test_the_gate_refuses(tmp_path: Path, how: dict[str, Any], why: str) -> None:
    if how == {"gpu": None} and shutil.which("nvidia-smi", path="/usr/bin:/bin"):
        pytest.skip("this machine has a driver")
    done, attestation = run_gate(tmp_path, **how)
    assert done.returncode != 0 and why in done.stderr
    assert not attestation.exists()


# The package.


def test_the_package_holds_what_the_unit_needs() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    crate = DEPLOY.parent / "crates" / "s4-cli"
    deb = tomllib.loads((crate / "Cargo.toml").read_text())["package"]["metadata"]["deb"]
    for source, _, _ in deb["assets"]:
        assert source.startswith("target/") or (crate / source).exists(), source
    places = {
        target + (Path(source).name if target.endswith("/") else "")
        for source, target, _ in deb["assets"]
    }
    assert {"usr/bin/s4w", "lib/systemd/system/s4w-runner.service"} <= places
    assert setting("ExecStart") == ["/usr/bin/s4w serve --config /etc/s4weights/runner.toml"]
    assert "etc/s4weights/runner.toml" in places


# The batch script.


def test_a_batch_job_relays_the_signal_and_waits_for_the_runner(tmp_path: Path) -> None:
    bin = tmp_path / "bin"
    bin.mkdir()
    log = tmp_path / "log"
    body = """#!/bin/bash
trap 'echo {0} usr1 >> {log}' USR1
trap 'echo {0} term >> {log}; {end}' TERM
echo {0} "$@" >> {log}
{work}
"""
    forever = "while true; do sleep 0.05; done"
    once = "for _ in $(seq 40); do sleep 0.05; done; exit 3"
    for name, work, end in (
        ("s4w", forever, "sleep 0.3; echo s4w done >> {log}; exit 0"),
        ("train", once, "exit 9"),
    ):
        text = body.format(name, log=log, work=work, end=end.format(log=log))
        (bin / name).write_text(text)
        (bin / name).chmod(0o755)
    job = subprocess.Popen(
        [str(DEPLOY / "slurm" / "train.sbatch"), "--epochs", "1"],
        env={
            "PATH": f"{bin}:/usr/bin:/bin",
            "STORE": "s3://b/r",
            "SLURM_JOB_ID": "7",
            "SLURM_TMPDIR": str(tmp_path),
            "STATE_DIR": str(tmp_path / "state"),
            "HOME": str(tmp_path),
            "TRAIN": "train",
        },
    )
    end = time.monotonic() + 30
    while not log.exists() or len(log.read_text().splitlines()) < 2:
        assert time.monotonic() < end
        time.sleep(0.02)
    time.sleep(0.3)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(30) == 3, "the trainer's own code"
    lines = log.read_text().splitlines()
    assert "s4w usr1" in lines and "train usr1" in lines
    assert "train --epochs 1" in lines
    assert lines[-2:] == ["s4w term", "s4w done"]
    assert any(line.startswith("s4w serve --store s3://b/r ") for line in lines)


# Pods.


def test_the_sidecar_is_confined() -> None:
    job = yaml.safe_load((DEPLOY / "helm" / "sidecar.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (runner,) = pod["initContainers"]
    assert runner["restartPolicy"] == "Always"
    assert pod["terminationGracePeriodSeconds"] >= 120
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert runner["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "nvidia.com/gpu" not in str(runner["resources"])
    assert runner["startupProbe"]["httpGet"]["path"] == "/readyz"


@pytest.mark.skipif(not shutil.which("helm"), reason="needs helm")
def test_the_chart_is_confined() -> None:
    chart = str(DEPLOY / "helm" / "s4w-runner")
    command = ["helm", "template", "r", chart, "--set", "store=s3://b/r", "--set", "keepLast=3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {d["kind"]: d for d in yaml.safe_load_all(done.stdout) if d}
    pod = found["DaemonSet"]["spec"]["template"]["spec"]
    (runner,) = pod["containers"]
    assert runner["securityContext"]["readOnlyRootFilesystem"] is True
    assert runner["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod["terminationGracePeriodSeconds"] == 120
    assert "keep_last = 3" in found["ConfigMap"]["data"]["runner.toml"]
    refused = subprocess.run(["helm", "template", "r", chart], capture_output=True, text=True)
    assert "store is needed" in refused.stderr


def test_the_container_is_confined() -> None:
    text = (DEPLOY / "container" / "Containerfile").read_text()
    last = text[text.rindex("\nFROM ") :]
    assert "distroless" in last and re.search(r"(?m)^USER 65532:65532$", last)
    assert "HEALTHCHECK" not in text and "ADD " not in text
    assert "org.opencontainers.image.licenses" in last
