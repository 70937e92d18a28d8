#!/usr/bin/env bash
# Runs the accelerator kit on a machine with one GPU, without network: benchmarks/accelerator/README.md.
#
#     run.sh OUT [smoke]
#
# OUT gets RESULTS.md and log.txt. PYTHON names the interpreter (python3) that has the machine's jax.
set -euo pipefail
began=$(date +%s.%N)
kit=$(cd "$(dirname "$0")" && pwd)
out=${1:?"expected run.sh OUT [smoke], found no OUT"}
mkdir -p "$out"
out=$(cd "$out" && pwd)
shift

checkout=$kit
while [ ! -e "$checkout/benchmarks/accelerator/kit.py" ]; do
    if [ "$checkout" = / ]; then
        echo "$kit: expected in a checkout of holdfast, which has the tests and benchmarks; build the kit into a folder of one" >&2
        exit 2
    fi
    checkout=$(dirname "$checkout")
done

python=${PYTHON:-python3}
# shellcheck source=/dev/null
. "$kit/made-for"
"$python" -c '
import os, platform, sys
python, glibc, machine = sys.argv[1:]
found = "%d.%d" % sys.version_info[:2]
name, version = platform.libc_ver()
number = lambda text: [int(each) for each in text.split(".")]
if found != python:
    sys.exit("the kit is for Python %s, and %s is %s: name another by PYTHON=, or build the kit with %s as its second argument" % (python, sys.executable, found, found))
if platform.machine() != machine:
    sys.exit("the kit is for %s, and this machine is %s" % (machine, platform.machine()))
if name != "glibc" or number(version) < number(glibc):
    sys.exit("the kit needs glibc %s or newer, and this machine has %s" % (glibc, " ".join([name, version]).strip() or "another C library"))
' "$made_for_python" "$made_for_glibc" "$made_for_machine"

# No environment of its own: that machine's python3 is one itself, and would not pass on its jax.
site=$(mktemp -d)
"$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --target "$site" "$kit"/*.whl
export PYTHONPATH="$site" PATH="$site/bin:$PATH"
export ACCELERATOR_KIT_COMMIT="$made_from" ACCELERATOR_KIT_BEGAN="$began" ACCELERATOR_KIT_SITE="$site"
cd "$checkout"
exec "$python" "$checkout/benchmarks/accelerator/kit.py" "$out" "$@"
