#!/usr/bin/env bash
# Installs the runner, the wheel for trainers, nvCOMP from NVIDIA's own package, and cfn-signal. Every download is
# checked against a hash.
set -euo pipefail
: "${CFN_BOOTSTRAP:?set it to the version of aws-cfn-bootstrap-py3}"
: "${CFN_BOOTSTRAP_SHA256:?set it to the SHA-256 of its archive}"
export DEBIAN_FRONTEND=noninteractive

apt-get update
apt-get install -y --no-install-recommends python3-venv curl openssl
apt-get install -y --no-install-recommends /tmp/s4weights.deb
systemctl disable s4w-runner.service

python3 -m venv /opt/s4weights
/opt/s4weights/bin/pip install --no-cache-dir --only-binary :all: --require-hashes -r /tmp/requirements.txt
/opt/s4weights/bin/pip install --no-cache-dir --no-index --no-deps /tmp/*.whl

archive=/tmp/aws-cfn-bootstrap-py3-$CFN_BOOTSTRAP.tar.gz
curl --fail --silent --show-error --location --proto '=https' --retry 3 --output "$archive" \
    "https://s3.amazonaws.com/cloudformation-examples/aws-cfn-bootstrap-py3-$CFN_BOOTSTRAP.tar.gz"
echo "$CFN_BOOTSTRAP_SHA256  $archive" | sha256sum --check --strict
python3 -m venv /opt/aws
/opt/aws/bin/pip install --no-cache-dir --only-binary :all: --require-hashes -r /tmp/requirements-cfn.txt
/opt/aws/bin/pip install --no-cache-dir --no-index --no-build-isolation --use-pep517 "$archive"
test -x /opt/aws/bin/cfn-signal
