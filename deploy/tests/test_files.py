"""What the unit, the image's build and gate, the package and the pods must do."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from template import DEPLOY

UNIT = DEPLOY / "systemd" / "s4w-runner.service"
NVME = DEPLOY / "systemd" / "nvme.conf"
WATCH = DEPLOY / "systemd" / "watch.conf"
PROGRAMS = [*sorted((DEPLOY / "ami").glob("*.sh")), DEPLOY / "slurm" / "train.sbatch"]
MAINTAINER = sorted((DEPLOY / "deb").iterdir())


def setting(name: str, text: str | None = None) -> list[str]:
    return re.findall(rf"(?m)^{name}=(.*)$", UNIT.read_text() if text is None else text)


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


def below_home() -> str:
    """The text of `watch.conf` for a folder that the sandbox hides."""
    text = re.sub(r"(?m)^#(?=[A-Z]\w+=)", "", WATCH.read_text())
    return re.sub(r"(?m)^ReadWritePaths=.*\n", "", text)


# The unit.


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd")
@pytest.mark.parametrize("drop_in", [None, "nvme", "watch", "watch below /home"])
def test_systemd_takes_the_unit(tmp_path: Path, drop_in: str | None) -> None:
    text = UNIT.read_text()
    for program in ("/usr/bin/s4w", "/usr/bin/nvidia-modprobe"):
        assert program in text
        text = text.replace(program, "/bin/true")
    unit = tmp_path / UNIT.name
    unit.write_text(text)
    if drop_in:
        texts = {"nvme": NVME.read_text(), "watch": WATCH.read_text()}
        (tmp_path / f"{UNIT.name}.d").mkdir()
        (tmp_path / f"{UNIT.name}.d" / "a.conf").write_text(texts.get(drop_in, below_home()))
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


def test_a_watched_folder_can_be_opened_to_the_service() -> None:
    # What would hide it, or keep what is in it from being removed.
    assert setting("ProtectHome") == setting("PrivateTmp") == ["yes"]
    assert setting("ProtectSystem") == ["strict"]
    text = WATCH.read_text()
    (folder,) = setting("ReadWritePaths", text)
    assert setting("RequiresMountsFor", text) == [folder]
    # Only what is needed: other homes stay hidden.
    assert not setting("ProtectHome", text) and not setting("BindPaths", text)
    hidden = below_home()
    # In a home that is hidden by `yes`, nothing can be mounted.
    assert setting("ProtectHome", hidden) == ["tmpfs"]
    assert [Path(path).parts[1] for path in setting("BindPaths", hidden)] == ["home"]
    toml = (WATCH.parent / "runner.toml").read_text()
    assert f'# [watch]\n# folder = "{folder}"\n# remove = true\n' in toml
    # A table goes on to the end of the file.
    assert not re.search(r"(?m)^\w", toml[toml.index("[watch]") :])


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


def test_an_image_can_be_shared_and_sold() -> None:
    text = (DEPLOY / "ami" / "runner.pkr.hcl").read_text()
    # A snapshot that is encrypted with the default key can be neither; volumes are when they are made.
    (variable,) = re.findall(r'(?ms)^variable "encrypt_boot" \{$(.*?)^\}$', text)
    assert re.search(r"(?m)^  default += false$", variable) and "Marketplace" in variable
    assert re.findall(r"(?m)^ +encrypt_boot += (.*)$", text) == ["var.encrypt_boot"]


@pytest.mark.parametrize("cloud_init", [True, False])
def test_an_image_has_no_logs_of_the_machine_that_built_it(
    tmp_path: Path, cloud_init: bool
) -> None:
    bin, root, log = tmp_path / "bin", tmp_path / "root", tmp_path / "log"
    bin.mkdir()
    stubs = ["apt-get", "journalctl", "sync"] + ["cloud-init"] * cloud_init
    for name in stubs:
        (bin / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {log}\n')
        (bin / name).chmod(0o755)
    for name in ("find", "rm", "truncate"):
        (bin / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    emptied = ["syslog", "cloud-init-output.log", "apt/history.log", "dpkg.log", "wtmp", "a b.log"]
    removed = ["syslog.1", "syslog.2.gz", "apt/term.log.1.gz", "Xorg.0.log.old"]
    kept = ["journal/0123/system.journal", "journal/0123/system.log.1"]
    for name in emptied + removed + kept:
        (root / "var/log" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "var/log" / name).write_text("ubuntu from 192.0.2.1\n")
    (root / "secret").write_text("elsewhere")
    (root / "var/log/link.log").symlink_to(root / "secret")
    (root / "etc").mkdir()
    (root / "etc/machine-id").write_text("0123\n")
    # Nothing of this machine is touched.
    text = re.sub(r"(?m)(^#.*\n| #.*$)", "", (DEPLOY / "ami" / "scrub.sh").read_text())
    text = re.sub(r"(?<![\w*.])/(?!dev/null\b)", f"{root}/", text)
    for path in re.findall(r"(?<![\w*.])/\S*", text):
        assert path.startswith((f"{root}/", "/dev/null")), path
    for _ in range(2):
        # Twice: nothing is left to do then.
        subprocess.run(
            [shutil.which("bash") or "/bin/bash", "-c", text],
            env={"PATH": str(bin)},
            cwd=tmp_path,
            check=True,
        )
        for name in emptied:
            assert (root / "var/log" / name).stat().st_size == 0, name
        assert not [name for name in removed if (root / "var/log" / name).exists()]
        assert all((root / "var/log" / name).stat().st_size for name in kept)
        assert (root / "secret").read_text() == "elsewhere"
        assert (root / "etc/machine-id").read_text() == ""
    lines = log.read_text().splitlines()
    assert ("cloud-init clean --logs --seed" in lines) == cloud_init
    assert "journalctl --rotate --vacuum-time=1s" in lines


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
        ({"fault": 0}, "was not detected"),
        ({"fault": 4}, "was not detected"),
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
    # What the configuration says where to find.
    toml = (DEPLOY / "systemd/runner.toml").read_text()
    named = re.findall(r"/(usr/share/doc/\S+\.conf)\b", toml)
    assert len(named) == 2 and set(named) <= places


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
