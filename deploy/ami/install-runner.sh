#!/usr/bin/env bash
# Installs the runner, the wheel for trainers, nvCOMP from NVIDIA's own package, and cfn-signal.
set -euo pipefail
: "${NVCOMP:?the version of nvidia-nvcomp-cu12}"
export DEBIAN_FRONTEND=noninteractive

apt-get update
apt-get install -y --no-install-recommends python3-venv curl
apt-get install -y --no-install-recommends /tmp/s4weights.deb
systemctl disable s4w-runner.service

python3 -m venv /opt/s4weights
/opt/s4weights/bin/pip install --no-cache-dir /tmp/*.whl "nvidia-nvcomp-cu12==${NVCOMP}"

python3 -m venv /opt/aws
/opt/aws/bin/pip install --no-cache-dir \
    https://s3.amazonaws.com/cloudformation-examples/aws-cfn-bootstrap-py3-latest.tar.gz
test -x /opt/aws/bin/cfn-signal
