#!/usr/bin/env bash
# Installs Ubuntu's own kernel modules of a driver branch, which are signed and built for the kernel, and holds both
# at their versions. L4 and L40S are Ada GPUs, which the open modules support.
set -euo pipefail
: "${DRIVER:?set it to the branch of the driver}"
export DEBIAN_FRONTEND=noninteractive

apt-get update
apt-get install -y --no-install-recommends linux-aws "linux-modules-nvidia-${DRIVER}-server-open-aws" \
    "nvidia-utils-${DRIVER}-server" "libnvidia-compute-${DRIVER}-server" nvidia-modprobe \
    "nvidia-compute-utils-${DRIVER}-server"
apt-mark hold linux-aws linux-image-aws linux-headers-aws "linux-modules-nvidia-${DRIVER}-server-open-aws" \
    "nvidia-utils-${DRIVER}-server" "libnvidia-compute-${DRIVER}-server"
cat >/etc/apt/apt.conf.d/51s4weights-hold <<'CONFIG'
Unattended-Upgrade::Package-Blacklist { "linux-"; "nvidia-"; "libnvidia-"; };
CONFIG
