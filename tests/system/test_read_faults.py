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

SCRIPT = """
import ctypes, json, logging, os, sys
import numpy as np
from holdfast.checkpoint import CheckpointError, CheckpointManager, Options, load, verify
from holdfast.checkpoint.layouts.detect import open_checkpoint
from holdfast.checkpoint.storage.path import StorePath, open_storage
from holdfast.checkpoint.tools.convert import convert

root, which, number, times = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
logging.disable()
preloaded = ctypes.CDLL(None)
tree = lambda step: {"w": np.arange(300_000.0) + step, "v": np.full(3, step), "name": f"step {step}"}

def same(got, step):
    return np.array_equal(got["w"], tree(step)["w"]) and np.array_equal(got["v"], tree(step)["v"]) and got["name"] == f"step {step}"

with CheckpointManager(root + "/run") as manager:
    for step in (1, 2):
        manager.save(step, tree(step), metrics={"loss": step}, metadata=step)
convert(open_checkpoint(root + "/run"), StorePath(open_storage(root + "/flat"), ""), "safetensors")
manager = CheckpointManager(root + "/run", options=Options(read_only=True))
calls = {
    "restore": lambda: same(manager.restore(), 2),
    "restore a step": lambda: same(manager.restore(1, like=tree(0)), 1),
    "fallback": lambda: same(got := manager.restore(fallback=True), 2) or same(got, 1),
    "load": lambda: same(load(root + "/run"), 2),
    "load safetensors": lambda: np.array_equal(load(root + "/flat")["w"], tree(2)["w"]),
    "verify": lambda: verify(root + "/run").step == 2,
    "metrics": lambda: manager.metrics(2) == {"loss": 2},
    "metadata": lambda: manager.metadata(2) == 2,
    "all_steps": lambda: manager.all_steps() == [1, 2],
    "best_step": lambda: manager.best_step("loss") == 1,
}
for at in range(1000):
    preloaded.readfault_arm((root + "/").encode(), ctypes.c_long(at), ctypes.c_long(times), number)
    try:
        how = "exact" if calls[which]() else "wrong"
        kind, text = "", ""
    except Exception as error:
        how, kind, text = "typed" if isinstance(error, CheckpointError) else "raw", type(error).__name__, str(error)
    reached = preloaded.readfault_count() > at
    preloaded.readfault_arm(b"", ctypes.c_long(0), ctypes.c_long(0), 0)
    print(json.dumps([how, kind, text, reached]), flush=True)
    if not reached:
        break
manager.close()
"""

CALLS = (
    *("restore", "restore a step", "fallback", "load", "load safetensors"),
    *("verify", "metrics", "metadata", "all_steps", "best_step"),
)
OF_A_STEP = (
    "restore a step",
    "metrics",
    "metadata",
)  # elsewhere ENOENT is an answer: the step is not there
FAST = {
    ("restore", "EIO", 1),
    ("fallback", "EIO", 1),
    ("load", "EACCES", 1000),
    ("best_step", "ESTALE", 1),
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
        for error in (
            "EIO",
            "ESTALE",
            "EACCES",
            "EMFILE",
            *(["ENOENT"] if call in OF_A_STEP else []),
        )
        for times in (1, 1000)
    ],
)
def test_an_error_at_each_system_call_of_a_restore(
    tmp_path: Path, library: Path, call: str, error: str, times: int
) -> None:
    """Whatever is read when an error comes up, once or from then on: exact values or a
    CheckpointError that names a path below the root.
    """
    command = [
        sys.executable,
        "-c",
        SCRIPT,
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
    assert found[-1][0] == "exact" and not found[-1][3] and len(found) > 3, (
        "the walk did not come to the end"
    )
    if call in ("restore", "verify") and error == "EIO":
        assert any(
            ".safetensors cannot be read: Input/output error; look at the disk" in text
            for _, _, text, _ in found
        )
    for how, kind, text, _ in found:
        assert how in ("exact", "typed"), (how, kind, text)
        assert how == "exact" or str(tmp_path) in text, (kind, text)
        if how == "typed" and error in ("EACCES", "EMFILE") and call != "load safetensors":
            assert {"EACCES": "lacks the permission", "EMFILE": "ulimit -n"}[error] in text, text
