#!/bin/sh
# Installs what the slow tests of the Slurm and MPI engines need, from Debian's own packages: slurm-wlm, munge, openmpi-bin.
# Starts nothing: the tests run their own munged, slurmctld and slurmd on loopback and end them.
set -eu
test "$(id -u)" -eq 0 || { echo "install_slurm.sh must run as root" >&2; exit 1; }
# A package's service must not start by itself while it is being installed (no daemon may listen beyond loopback).
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends slurm-wlm munge openmpi-bin
