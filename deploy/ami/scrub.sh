#!/usr/bin/env bash
# Removes what belongs to the build machine only: keys, logs, histories, the package cache, the machine id.
set -euo pipefail

rm -rf /tmp/s4weights.deb /tmp/*.whl /tmp/requirements*.txt /tmp/aws-cfn-bootstrap-*.tar.gz
rm -rf /var/lib/s4weights/* /etc/s4weights/runner.toml
apt-get clean
# Its logs and what it knows of this instance, so that the next boot is a first one.
if command -v cloud-init >/dev/null; then
    cloud-init clean --logs --seed
fi
rm -rf /var/lib/apt/lists/* /var/lib/cloud/instances /var/lib/cloud/instance
rm -f /etc/ssh/ssh_host_* /root/.bash_history /home/*/.bash_history
rm -f /root/.ssh/authorized_keys /home/*/.ssh/authorized_keys
# Programs have their logs open, and some of them do not make a missing one.
find /var/log -ignore_readdir_race -path /var/log/journal -prune -o -type f \
    '(' -name '*.gz' -o -name '*.[0-9]' -o -name '*.old' ')' -exec rm -f {} +
find /var/log -ignore_readdir_race -path /var/log/journal -prune -o -type f -exec truncate --no-create -s 0 {} +
journalctl --rotate --vacuum-time=1s
truncate -s 0 /etc/machine-id
sync
