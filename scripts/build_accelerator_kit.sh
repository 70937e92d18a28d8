#!/usr/bin/env bash
# Builds the accelerator kit into an empty or new folder of this checkout: benchmarks/accelerator/README.md.
#
#     scripts/build_accelerator_kit.sh FOLDER [PYTHON]
#
# It holds holdfast's wheel, those of wheels.txt for Python PYTHON (3.12) on x86-64, and run.sh.
set -euo pipefail
glibc=2.28
machine=x86_64
most_mb=40
usage="expected scripts/build_accelerator_kit.sh FOLDER [PYTHON], such as build/accelerator-kit 3.12"
folder=${1:?"$usage"}
version=${2:-3.12}
root=$(cd "$(dirname "$0")/.." && pwd -P)
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3

folder=$(realpath -m "$folder")
case $folder/ in
"$root"/?*) ;;
*)
    echo "$folder: expected a folder in the checkout $root, whose tests and benchmarks the kit runs" >&2
    exit 2
    ;;
esac
if [ -e "$folder" ] && [ ! -e "$folder/made-for" ] && [ -n "$(ls -A "$folder")" ]; then
    echo "$folder: expected an empty folder, or a kit; name another" >&2
    exit 2
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/source" "$scratch/kit"
pip() { "$python" -m pip "$@" --quiet --disable-pip-version-check; }
# A copy: setuptools leaves its build folder behind, and the next wheel would hold what has been deleted since.
(cd "$root" && git ls-files -z | xargs -0 cp --parents --no-dereference -t "$scratch/source")
pip wheel --no-deps --wheel-dir "$scratch/kit" "$scratch/source"
platforms=()
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${tag}_$machine")
done
pip download --no-deps --only-binary=:all: --implementation cp --python-version "$version" "${platforms[@]}" \
    --dest "$scratch/kit" --requirement "$root/scripts/accelerator_kit/wheels.txt"
cp "$root/scripts/accelerator_kit/run.sh" "$scratch/kit"
cat >"$scratch/kit/made-for" <<END
made_for_python=$version
made_for_glibc=$glibc
made_for_machine=$machine
made_from=$(git -C "$root" describe --always --dirty)
END

size_mb=$(du --summarize --block-size=1M "$scratch/kit" | cut -f 1)
if [ "$size_mb" -gt "$most_mb" ]; then
    echo "the kit has $size_mb MB: expected at most $most_mb" >&2
    exit 1
fi
rm -rf "$folder"
mkdir -p "$(dirname "$folder")"
cp -r "$scratch/kit" "$folder"
echo "$folder: $size_mb MB"
