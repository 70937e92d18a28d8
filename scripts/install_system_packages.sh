#!/usr/bin/env bash
# Installs what some tests need of the system: Slurm, munge, Open MPI, MPICH, network tools, FUSE, a browser; and Azurite, which stands for Azure's
# blobs, into build/azurite. For Debian and its kin, as root.
set -euo pipefail
cd "$(dirname "$0")/.."
wanted=(slurm-wlm munge openmpi-bin mpich iproute2 iptables fuse3 gcc libc6-dev chromium)
command -v npm > /dev/null || wanted+=(nodejs npm)
# The last one that runs on Debian's node.
install_azurite() {
  [ -x build/azurite/node_modules/.bin/azurite-blob ] && return
  npm install --prefix build/azurite --silent --no-fund --no-audit azurite@3.35.0 || echo "Azurite could not be installed"
}
missing=()
for package in "${wanted[@]}"; do
  dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
  install_azurite
  exit 0
fi
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
install_azurite
