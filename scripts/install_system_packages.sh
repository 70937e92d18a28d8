#!/usr/bin/env bash
# Installs what some tests need of the system: Slurm, munge, Open MPI, network tools, a browser; and where there is npm, Azurite, which
# stands for Azure's blobs. For Debian and its kin, as root.
set -euo pipefail
wanted=(slurm-wlm munge openmpi-bin iproute2 iptables gcc libc6-dev chromium)
missing=()
for package in "${wanted[@]}"; do
  dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
if command -v npm > /dev/null && ! command -v azurite-blob > /dev/null; then
  npm install -g --silent --no-fund --no-audit azurite || echo "Azurite could not be installed"
fi
[ ${#missing[@]} -eq 0 ] && exit 0
export DEBIAN_FRONTEND=noninteractive
# A package's own daemon must not start: tests start their own, on loopback.
policy=/usr/sbin/policy-rc.d
made_policy=false
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' > "$policy" && chmod +x "$policy" && made_policy=true
fi
trap '$made_policy && rm -f "$policy" || true' EXIT
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}"
