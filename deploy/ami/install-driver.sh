#!/usr/bin/env bash
# Installs Ubuntu's own kernel modules of a driver's branch, signed and made for the kernel, and keeps both as they
# are. L4 and L40S are Ada: the open modules know them.
set -euo pipefail
: "${DRIVER:?the branch of the driver}"
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
