"""A store that fails while it is read: what comes back is exact or one typed error that names the
file and says what to do.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.killpoints import build
from tests.support.paths import program

SCRIPT = program("read_faults_script")

CALLS = (
    *("restore", "restore a step", "fallback", "load", "load safetensors"),
    *("verify", "metrics", "metadata", "all_steps", "best_step"),
)
FAST = {
    ("restore", "EIO", 1),
    ("fallback", "EMFILE", 1),
    ("all_steps", "ENOENT", 1),
    ("load safetensors", "EIO", 1),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("readfault"), "readfault")


@pytest.mark.parametrize(
    ("call", "error", "times"),
    [
        pytest.param(
            call, error, times, marks=[] if (call, error, times) in FAST else [pytest.mark.slow]
        )
        for call in CALLS
        for error in ("EIO", "ESTALE", "EACCES", "EMFILE", "ENOENT")
        for times in (1, 1000)
    ],
)
def test_an_error_at_each_call_of_a_restore(
    tmp_path: Path, library: Path, call: str, error: str, times: int
) -> None:
    """Whatever is read when an error comes up, once or from then on: exact values, of the newest
    step, or a CheckpointError that names a path below the root.
    """
    command = [
        sys.executable,
        str(SCRIPT),
        str(tmp_path),
        call,
        str(getattr(errno, error)),
        str(times),
    ]
    environment = {**os.environ, "LD_PRELOAD": str(library), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    print(f"{len(found) - 1} injected read errors")
    assert found[-1][0] == "exact" and not found[-1][3] and len(found) > 3, (
        "the walk did not come to the end"
    )
    if call in ("restore", "verify") and error == "EIO" and times > 1:
        assert any(
            ".safetensors cannot be read: Input/output error; look at the disk" in text
            for _, _, text, _ in found
        )
    for how, kind, text, _ in found:
        assert how in ("exact", "typed"), (how, kind, text)
        assert how == "exact" or str(tmp_path) in text, (kind, text)
        if how == "typed" and error in ("EACCES", "EMFILE") and call != "load safetensors":
            assert {"EACCES": "lacks the permission", "EMFILE": "ulimit -n"}[error] in text, text
