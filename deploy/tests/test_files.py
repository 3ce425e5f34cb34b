"""What the unit, the image's build and gate, the package, the batch script and the pods must do."""

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
NVME = DEPLOY / "systemd" / "nvme.conf"
PROGRAMS = [*sorted((DEPLOY / "ami").glob("*.sh")), DEPLOY / "slurm" / "train.sbatch"]
MAINTAINER = sorted((DEPLOY / "deb").iterdir())


def setting(name: str, text: str | None = None) -> list[str]:
    return re.findall(rf"(?m)^{name}=(.*)$", UNIT.read_text() if text is None else text)


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


# The unit.


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd")
@pytest.mark.parametrize("drop_in", [False, True])
def test_systemd_takes_the_unit(tmp_path: Path, drop_in: bool) -> None:
    text = UNIT.read_text()
    for program in ("/usr/bin/s4w", "/usr/bin/nvidia-modprobe"):
        assert program in text
        text = text.replace(program, "/bin/true")
    unit = tmp_path / UNIT.name
    unit.write_text(text)
    if drop_in:
        (tmp_path / f"{UNIT.name}.d").mkdir()
        shutil.copy(NVME, tmp_path / f"{UNIT.name}.d")
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
    # Told to end, with something left to upload: `systemctl stop` leaves no failed unit.
    assert setting("SuccessExitStatus") == ["74"]
    assert seconds(setting("WatchdogSec")[0]) >= 120


def test_only_a_refusal_and_a_bad_configuration_are_final() -> None:
    assert setting("Restart") == ["on-failure"]
    assert setting("RestartPreventExitStatus") == ["77 78"]
    # Restarts are not limited, so they must not be too fast.
    assert setting("StartLimitIntervalSec") == ["0"] and not setting("StartLimitBurst")
    assert seconds(setting("RestartSec")[0]) >= 10
    # Supported only from systemd 254 on, and Ubuntu 22.04 has 249.
    assert not setting("RestartSteps") and not setting("RestartMaxDelaySec")


def test_the_gpu_and_other_users_are_visible_in_the_sandbox() -> None:
    assert setting("DevicePolicy") == ["closed"] and setting("DeviceAllow") == ["char-nvidia* rw"]
    # In its own user namespace, the service would see every trainer as `nobody`.
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


def test_the_staging_drive_is_mounted_and_has_its_folders_before_the_service_starts() -> None:
    assert setting("RequiresMountsFor") == ["/var/lib/s4weights"]
    text = NVME.read_text()
    (drive,) = setting("RequiresMountsFor", text)
    mounted, made = setting("ExecStartPre", text)
    # Both run outside the sandbox (`+`), and their failures are not ignored (no `-`); tmpfiles
    # follows no link that the service's user made.
    assert mounted == f"+/usr/bin/mountpoint -q {drive}"
    assert made == "+/usr/bin/systemd-tmpfiles --create /etc/s4weights/nvme.tmpfiles"
    lines = (NVME.parent / "nvme.tmpfiles").read_text()
    there = dict(re.findall(r"(?m)^d (\S+) (\d+) s4weights s4weights -$", lines))
    (root,) = setting("ReadWritePaths", text)
    assert root.startswith(f"{drive}/") and f"-{root}" in setting("ReadWritePaths")[0].split()
    assert there == {root: "0750", f"{root}/incoming": "3770", f"{root}/restored": "2770"}
    assert f'# staging_dir = "{root}"' in (NVME.parent / "runner.toml").read_text()


# The image.


def packer() -> dict[str, Any]:
    hcl2 = pytest.importorskip("hcl2")
    with (DEPLOY / "ami" / "runner.pkr.hcl").open() as file:
        found: dict[str, Any] = hcl2.load(file)
    return found


def provisioners() -> list[dict[str, Any]]:
    (build,) = packer()["build"]
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


def plain(value: Any) -> Any:
    """The value without the quotes that some versions of hcl2 leave around texts and names."""
    if isinstance(value, dict):
        return {str(k).strip('"'): plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    return value.strip('"') if isinstance(value, str) else value


def test_an_image_is_built_from_what_is_named() -> None:
    found = plain(packer())
    (plugins,) = found["packer"][0]["required_plugins"]
    assert re.fullmatch(r"= \d+\.\d+\.\d+", plugins["amazon"]["version"])
    variables = {name: body for v in found["variable"] for name, body in v.items()}
    for needed in ("base_ami", "cfn_bootstrap_sha256"):
        assert "default" not in variables[needed] and variables[needed]["validation"], needed
    (source,) = [body for s in found["source"] for kind in s.values() for body in kind.values()]
    (base,) = source["source_ami_filter"]
    assert "most_recent" not in base and base["owners"] == ["099720109477"]
    assert "base_ami" in base["filters"]["image-id"]


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-cfn.txt"])
def test_packages_have_versions_that_exist_and_hashes(name: str) -> None:
    text = (DEPLOY / "ami" / name).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for line in lines:
        assert re.fullmatch(r"[a-z0-9-]+==[0-9.]+ +--hash=sha256:[0-9a-f]{64}", line), line
    if name == "requirements.txt":
        # NVIDIA's versions have four parts: there is no 6.0.0.
        assert all(re.search(r"nvcomp-cu12==\d+\.\d+\.\d+\.\d+ ", line) for line in lines)


def test_nothing_from_the_network_is_installed_without_a_hash() -> None:
    text = (DEPLOY / "ami" / "install-runner.sh").read_text().replace("\\\n", " ")
    assert "latest" not in text
    installs = re.findall(r"(?m)^.*pip install.*$", text)
    assert len(installs) == 4
    for line in installs:
        assert "--require-hashes" in line or "--no-index" in line, line
    (_, after) = text.split("curl --fail ", 1)
    assert after.index("sha256sum --check --strict") < after.index("pip install")


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
    """Runs the gate with stand-ins for `s4w` and for the programs of the machine."""
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


@pytest.mark.parametrize("configured", [True, False])
@pytest.mark.parametrize("before", ["", "0.1.0"])
@pytest.mark.parametrize("policy", [True, False])
def test_an_upgrade_restarts_what_runs_and_needs_no_configuration(
    tmp_path: Path, configured: bool, before: str, policy: bool
) -> None:
    bin, etc, log = tmp_path / "bin", tmp_path / "etc", tmp_path / "log"
    bin.mkdir()
    if configured:
        etc.mkdir()
        (etc / "runner.toml").touch()
    stubs = dict.fromkeys(("systemd-sysusers", "systemd-tmpfiles", "chown", "systemctl"), 0)
    if policy:
        # As if an administrator's policy forbade the restart.
        stubs["deb-systemd-invoke"] = 1
    for name, code in stubs.items():
        (bin / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {log}\nexit {code}\n')
        (bin / name).chmod(0o755)
    (bin / "chmod").symlink_to(shutil.which("chmod") or "/bin/chmod")
    text = (DEPLOY / "deb" / "postinst").read_text()
    text = text.replace("/etc/s4weights", str(etc)).replace("/run/systemd/system", str(tmp_path))
    done = subprocess.run(
        ["/bin/sh", "-c", text, "postinst", "configure", before], env={"PATH": str(bin)}
    )
    assert done.returncode == 0
    lines = log.read_text().splitlines()
    assert (f"chown root:s4weights {etc}/runner.toml" in lines) == configured
    assert "systemctl --system daemon-reload" in lines
    restarts = [line for line in lines if " try-restart " in line]
    program = "deb-systemd-invoke" if policy else "systemctl"
    assert restarts == ([f"{program} try-restart s4w-runner.service"] if before else [])
    if configured:
        assert (etc / "runner.toml").stat().st_mode & 0o777 == 0o640


# The batch script.


class Job:
    """The batch script with stand-ins for the runner and the trainer."""

    def __init__(
        self,
        tmp_path: Path,
        says: str = "drained open=0 seconds=0.2",
        code: int = 3,
        environment: dict[str, str] | None = None,
    ):
        bin = tmp_path / "bin"
        bin.mkdir()
        self.log = log = tmp_path / "log"
        self.staging = tmp_path / "s4weights-7"
        body = """#!/bin/bash
echo $$ > {log}.{0}
trap 'echo {0} usr1 >> {log}' USR1
trap 'echo {0} term >> {log}; {end}' TERM
echo {0} "$@" >> {log}
{work}
"""
        forever = "while true; do sleep 0.05; done"
        once = f"for _ in $(seq 40); do sleep 0.05; done; exit {code}"
        drain = f'sleep 0.3; echo " INFO {says}" >&2; echo s4w done >> {log}; exit 0'
        for name, work, end in (("s4w", forever, drain), ("train", once, "exit 9")):
            (bin / name).write_text(body.format(name, log=log, work=work, end=end))
            (bin / name).chmod(0o755)
        self.process = subprocess.Popen(
            [str(DEPLOY / "slurm" / "train.sbatch"), "--epochs", "1"],
            env={
                "PATH": f"{bin}:/usr/bin:/bin",
                "STORE": "s3://b/r",
                "SLURM_JOB_ID": "7",
                "SLURM_TMPDIR": str(tmp_path),
                "SLURMD_NODENAME": "node-1",
                "STATE_DIR": str(tmp_path / "state"),
                "HOME": str(tmp_path),
                "TMPDIR": str(tmp_path),
                "TRAIN": "train",
                **(environment or {}),
            },
            stderr=subprocess.PIPE,
            text=True,
        )

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def started(self) -> None:
        end = time.monotonic() + 30
        while len(self.lines()) < 2:
            assert time.monotonic() < end
            time.sleep(0.02)
        time.sleep(0.3)

    def ended(self) -> tuple[int, str]:
        _, said = self.process.communicate(timeout=30)
        return self.process.returncode, said


def test_a_batch_job_relays_the_signal_and_waits_for_the_runner(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.started()
    assert job.staging.stat().st_mode & 0o7777 == 0o700
    (job.staging / "local").mkdir()
    job.process.send_signal(signal.SIGUSR1)
    code, said = job.ended()
    assert code == 3, "the trainer's own code"
    lines = job.lines()
    assert "s4w usr1" in lines and "train usr1" in lines
    assert "train --epochs 1" in lines
    assert lines[-2:] == ["s4w term", "s4w done"]
    assert any(line.startswith("s4w serve --store s3://b/r ") for line in lines)
    assert "drained open=0" in said and "NOT ALL" not in said
    assert not job.staging.exists(), "all of it is durable"
    assert not list(tmp_path.glob("tmp.*"))


@pytest.mark.parametrize(
    ("says", "code", "exits"),
    [
        ("drained open=2 seconds=90", 0, 75),
        ("drained open=2 seconds=90", 3, 3),
        ("drained open=01 seconds=90", 0, 75),
        ("nothing that is known", 0, 75),
    ],
)
def test_a_batch_job_says_where_open_checkpoints_are(
    tmp_path: Path, says: str, code: int, exits: int
) -> None:
    job = Job(tmp_path, says, code)
    done, said = job.ended()
    assert done == exits
    for part in ("NOT ALL", "node-1", str(job.staging), str(tmp_path / "state")):
        assert part in said
    assert job.staging.exists()


@pytest.mark.parametrize("place", ["s4weights-7/queue/a.s4w", "state/journal/a.json"])
def test_a_batch_job_keeps_the_file_of_what_has_failed(tmp_path: Path, place: str) -> None:
    job = Job(tmp_path, code=0)
    job.started()
    (tmp_path / place).parent.mkdir()
    (tmp_path / place).write_text('{"id":"a","state":"failed"}\n')
    done, said = job.ended()
    assert done == 75 and "NOT ALL" in said
    assert job.staging.exists()


def test_a_batch_job_that_is_ended_does_not_end_a_drain(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.started()
    # Like Slurm, which signals every process.
    for name in ("s4w", "train"):
        os.kill(int((tmp_path / f"log.{name}").read_text()), signal.SIGTERM)
    job.process.send_signal(signal.SIGTERM)
    code, _ = job.ended()
    assert code == 9, "the trainer was told"
    assert job.lines().count("s4w term") == 1
    assert not job.staging.exists()


def test_a_batch_job_knows_how_a_trainer_ended_that_ended_while_it_was_told(tmp_path: Path) -> None:
    # The script is slow to go on after it has sent a signal.
    slow = tmp_path / "slow"
    slow.write_text('kill() { local code=0; builtin kill "$@" || code=$?; sleep 0.4; return $code; }\n')
    job = Job(tmp_path, environment={"BASH_ENV": str(slow)})
    job.started()
    time.sleep(0.5)  # Until it waits.
    os.kill(int((tmp_path / "log.s4w").read_text()), signal.SIGTERM)
    job.process.send_signal(signal.SIGTERM)
    code, _ = job.ended()
    assert code == 9, "the trainer's own code"


@pytest.mark.parametrize("what", ["link", "mode", "file", "owner"])
def test_a_batch_job_refuses_a_folder_of_somebody_else(tmp_path: Path, what: str) -> None:
    place = tmp_path / "s4weights-7"
    if what == "link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "theirs")
    elif what == "mode":
        place.mkdir()
        place.chmod(0o777)
    elif what == "owner":
        if os.geteuid() != 0:
            pytest.skip("needs root")
        place.mkdir(mode=0o700)
        os.chown(place, 65534, 65534)
    else:
        place.touch()
    job = Job(tmp_path)
    code, said = job.ended()
    assert code == 73 and "STAGING_DIR" in said
    assert not job.log.exists() and place.exists()


def test_a_requeued_batch_job_finds_its_folder_again(tmp_path: Path) -> None:
    place = tmp_path / "s4weights-7"
    place.mkdir(mode=0o700)
    job = Job(tmp_path)
    code, _ = job.ended()
    assert code == 3
    assert any(f"--staging-dir {place}" in line for line in job.lines())


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
    # While the store cannot be reached, /readyz fails, but checkpoints are still accepted.
    assert runner["startupProbe"]["httpGet"]["path"] == "/livez"
    assert runner["livenessProbe"]["httpGet"]["path"] == "/livez"


@pytest.mark.skipif(not shutil.which("helm"), reason="needs helm")
def test_the_chart_is_confined() -> None:
    chart = str(DEPLOY / "helm" / "s4w-runner")
    command = ["helm", "template", "r", chart, "--set", "store=s3://b/r", "--set", "keepLast=3"]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert "foldersImage.digest is needed" in refused.stderr
    digest = "sha256:" + "0" * 64
    command += ["--set", f"foldersImage.digest={digest}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {d["kind"]: d for d in yaml.safe_load_all(done.stdout) if d}
    pod = found["DaemonSet"]["spec"]["template"]["spec"]
    (runner,) = pod["containers"]
    assert runner["securityContext"]["readOnlyRootFilesystem"] is True
    assert runner["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod["initContainers"][0]["image"] == f"docker.io/library/busybox@{digest}"
    assert runner["image"] == "s4weights-runner:0.1.0"
    assert runner["startupProbe"]["httpGet"]["path"] == "/livez"
    assert pod["terminationGracePeriodSeconds"] == 120
    assert "keep_last = 3" in found["ConfigMap"]["data"]["runner.toml"]
    refused = subprocess.run(["helm", "template", "r", chart], capture_output=True, text=True)
    assert "store is needed" in refused.stderr


def test_the_chart_starts_without_its_store_and_from_images_with_digests() -> None:
    """What can be checked without helm."""
    chart = DEPLOY / "helm" / "s4w-runner"
    text = (chart / "templates" / "daemonset.yaml").read_text()
    probes = dict(re.findall(r"(startup|readiness|liveness)Probe:\s+httpGet: { path: (\S+),", text))
    assert probes == {"startup": "/livez", "readiness": "/readyz", "liveness": "/livez"}
    values = yaml.safe_load((chart / "values.yaml").read_text())
    assert values["foldersImage"]["digest"] == "" and "tag" not in values["foldersImage"]
    images = re.findall(r"(?m)^ *image: (.*)$", text)
    assert len(images) == 2
    assert 'required "foldersImage.digest' in images[0] and ".Values.image.digest" in images[1]


@pytest.mark.parametrize(
    "file", ["s4w-runner/values.yaml", "s4w-runner/templates/NOTES.txt", "../README.md"]
)
def test_trainers_are_told_what_they_need(file: str) -> None:
    text = (DEPLOY / "helm" / file).read_text()
    for part in ("/staging", "65532", "0660", "3770", "allowUids"):
        assert part in text, part


def test_the_container_is_built_from_named_images_and_the_workspace_alone() -> None:
    text = (DEPLOY / "container" / "Containerfile").read_text()
    bases = re.findall(r"(?m)^FROM (\S+)", text)
    wanted = re.findall(r"(?m)^ARG (\w+_DIGEST)$", text)
    assert len(bases) == len(wanted) == 2
    assert all(base.endswith(f"@${{{arg}}}") for base, arg in zip(bases, wanted, strict=True))


def test_the_build_sees_the_workspace_alone() -> None:
    root = DEPLOY.parent
    lines = (root / ".dockerignore").read_text().splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    assert lines[0] == "*"
    back = {line[1:] for line in lines if line.startswith("!")}
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    members = tomllib.loads((root / "Cargo.toml").read_text())["workspace"]["members"]
    assert back == {m.removesuffix("/*") for m in members} | {"Cargo.toml", "Cargo.lock"}
    assert {"**/target", "**/.venv*"} <= set(lines)


def test_the_container_is_confined() -> None:
    text = (DEPLOY / "container" / "Containerfile").read_text()
    last = text[text.rindex("\nFROM ") :]
    assert "distroless" in last and re.search(r"(?m)^USER 65532:65532$", last)
    assert "HEALTHCHECK" not in text and "ADD " not in text
    assert "org.opencontainers.image.licenses" in last
