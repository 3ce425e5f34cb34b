#!/usr/bin/env bash
# The gate of an image's build, and a check for any CUDA machine: no image is published unless every dtype comes back
# bit for bit on this GPU, also within the service's sandbox, and the test notices a damaged byte.
#
#   gate.sh [PROGRAM]
#
# Environment: ATTESTATION (file to write), UNIT (unit file whose sandbox is used; empty: none), COMMIT.
set -euo pipefail

program=${1:-/usr/bin/s4w}
attestation=${ATTESTATION:-/usr/share/s4weights/build-attestation.json}
unit=${UNIT-/lib/systemd/system/s4w-runner.service}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

say() { printf 'gate: %s\n' "$*"; }
fail() { printf 'gate: FAILED: %s\n' "$*" >&2; exit 1; }

# 1. A GPU, and its driver.
command -v nvidia-smi >/dev/null || fail "no nvidia-smi: this machine has no NVIDIA driver"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader >"$work/gpu" ||
    fail "nvidia-smi sees no GPU"
[[ -s $work/gpu ]] || fail "nvidia-smi sees no GPU"
say "GPU: $(head -n 1 "$work/gpu")"

# 2. Every dtype and every pattern on the CPU and the GPU, each also decoding what the other encoded.
"$program" selftest --require-gpu --quiet >"$work/selftest" || fail "the self-test failed"
say "self-test passed"

# 3. The same within the sandbox that the service runs in.
if [[ -n $unit ]]; then
    properties=()
    while IFS= read -r line; do
        properties+=(--property="$line")
    done < <(grep -E '^(User|Group|UMask|NoNewPrivileges|CapabilityBoundingSet|AmbientCapabilities|Protect[A-Za-z]*|Private[A-Za-z]*|Restrict[A-Z][A-Za-z]*|LockPersonality|SystemCall[A-Za-z]*|DevicePolicy|DeviceAllow|LimitMEMLOCK)=' "$unit" |
        grep -vE '^Restart')
    ((${#properties[@]} >= 15)) || fail "$unit has no sandbox"
    systemd-run --quiet --wait --pipe --collect "${properties[@]}" -- \
        "$program" selftest --require-gpu --quiet >"$work/sandboxed" ||
        fail "the self-test failed within the service's sandbox"
    cmp -s "$work/selftest" "$work/sandboxed" || fail "the self-test gives a different result within the sandbox"
    say "self-test passed within the sandbox of $unit"
fi

# 4. The test can fail: one damaged byte must be noticed.
set +e
"$program" selftest --require-gpu --inject-fault --quiet >"$work/fault" 2>&1
code=$?
set -e
[[ $code -eq 1 ]] || fail "a corrupted byte was not detected (exit code $code, expected 1)"
say "a corrupted byte was detected"

# 5. A record of the results, for whoever starts the image.
mkdir -p "$(dirname "$attestation")"
vectors=$(sha256sum <"$work/selftest" | cut -d ' ' -f 1)
version=$("$program" --version)
kernel=$(uname -r)
sandboxed=false
[[ -n $unit ]] && sandboxed=true
quoted() { printf '"%s"' "$(printf '%s' "$1" | tr -d '\000-\037' | sed 's/[\\"]/\\&/g')"; }
{
    printf '{\n'
    printf '  "version": %s,\n' "$(quoted "$version")"
    printf '  "commit": %s,\n' "$(quoted "${COMMIT:-unknown}")"
    printf '  "program_sha256": %s,\n' "$(quoted "$(sha256sum <"$program" | cut -d ' ' -f 1)")"
    printf '  "gpu": %s,\n' "$(quoted "$(head -n 1 "$work/gpu")")"
    printf '  "kernel": %s,\n' "$(quoted "$kernel")"
    printf '  "selftest_sha256": %s,\n' "$(quoted "$vectors")"
    printf '  "sandboxed": %s,\n' "$sandboxed"
    printf '  "fault_noticed": true,\n'
    printf '  "built": %s\n' "$(quoted "$(date -u +%Y-%m-%dT%H:%M:%SZ)")"
    printf '}\n'
} >"$work/attestation"
install -m 0644 "$work/attestation" "$attestation"
say "passed: $attestation"
