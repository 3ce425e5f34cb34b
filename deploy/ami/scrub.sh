#!/usr/bin/env bash
# Removes what belongs to the build machine only: keys, logs, histories, the package cache, the machine id.
set -euo pipefail

rm -rf /tmp/s4weights.deb /tmp/*.whl /tmp/requirements*.txt /tmp/aws-cfn-bootstrap-*.tar.gz
rm -rf /var/lib/s4weights/* /etc/s4weights/runner.toml
apt-get clean
rm -rf /var/lib/apt/lists/* /var/lib/cloud/instances /var/lib/cloud/instance
rm -f /etc/ssh/ssh_host_* /root/.bash_history /home/*/.bash_history
rm -f /root/.ssh/authorized_keys /home/*/.ssh/authorized_keys
journalctl --rotate --vacuum-time=1s
truncate -s 0 /etc/machine-id
sync
