"""Each benchmark runs, at its smallest: what nobody runs for weeks calls what is gone by then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"
# Parts of others, and what needs an argument that only they know.
PARTS = {"http_by_splice", "plot", "s3_server", "shaped_proxy"}
SMALL = {
    "barrier": "--clients 2 --rounds 3 --repeats 1",
    "collectives": "--processes 2 --rounds 3 --repeats 1",
    "facade": "--rounds 1 --leaves 4 --mib 0.1",
    "floor": "{folder} 4",
    "incremental": "--frozen-mib 8 --saves 1 --folder {folder}",
    "instruments": "--turns 1",
    "light_clients": "--clients 128 --workers 2",
    "local_tier": "--mib 16 --rounds 1 --throttle-s 1 --disk {folder}",
    "object_store": "--gb 0.05 --large-gb 0 --turns 1 --only holdfast",
    "orbax_read": "--folder {folder} --rounds 1 --verify-gigabytes 0.01",
    "plan_scale": "",
    "recovery": "--processes 2 --kills 1 --between 1 1",
    "relay_tree": "--counts 256",
    "replicas": "{folder} --leaves 4 --leaf-mib 0.1 --rounds 2",
    "restore_scale": "",
    "scale": "--counts 64 --repeats 1",
    "shared_restore": "--mib 8 --turns 1 --only once",
    "structure": "--leaves 40 --rounds 1",
    "surgery": "--folder {folder} --layers 1",
    "sync": "--processes 2 --rounds 3 --repeats 1",
    "versus_orbax": "--repeats 1 --only busy --disk {folder}",
    "viewers": "--processes 32 --viewers 1 --seconds 1 --rounds 1 --repeats 1",
    "waiting": "--clients 16 --processes 2 --seconds 1 --barriers 100 --heartbeat-timeout-s 2",
}


def test_each_has_its_smallest_run() -> None:
    """None is left out."""
    names = {path.stem for path in BENCHMARKS.glob("*.py")}
    assert names == SMALL.keys() | PARTS


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs(name: str, tmp_path: Path) -> None:
    """It ends with 0, and has printed something."""
    words = [word.format(folder=tmp_path) for word in SMALL[name].split()]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), *words],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0 and done.stdout, done.stderr[-3000:]
