"""What is searched is what runs: real runs log what they do, and the same rules judge it."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import CheckpointManager, KeepLast
from tests.support.killpoints import build, walk, walk_branch
from tests.support.object_servers import BUCKET, s3_server
from tests.support.paths import ROOT
from tests.support.tracing import TRACES, read_log, trace

from .conformance import FORGERIES, refusal
from .rules import Effect

EVERY = range(400)  # more than there are
ERRORS = (
    *(errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES),
    *(errno.ESTALE, errno.EROFS, errno.ETIMEDOUT, errno.EPERM, errno.EMFILE),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for traces."""
    traces = tmp_path / "traces"
    traces.mkdir()
    monkeypatch.setenv(TRACES, str(traces))
    return traces


def judge(folder: Path) -> list[list[Effect]]:
    """Returns the traces of a folder, all of which conform."""
    logs = sorted(folder.glob("*.trace"))
    traces = [read_log(log) for log in logs]
    refused = [why for effects in traces if (why := refusal(effects))]
    assert not refused, refused[:10]
    return traces


def check_forgeries(traces: Sequence[list[Effect]]) -> None:
    """Sees that each kind of forgery is refused in ten traces, at the event that is forged or at
    one that it makes impossible.
    """
    rng = random.Random(20261127)
    for forgery in FORGERIES:
        forged = [each for effects in traces if (each := forgery(list(effects))) is not None]
        assert forged, forgery.__name__
        for each in rng.sample(forged, min(10, len(forged))):
            why = refusal(each)
            assert why, forgery.__name__
            print(f"{forgery.__name__}: {why}")


def test_kills_conform(folder: Path, tmp_path: Path) -> None:
    """A share of the points at which a save is killed; a trace with one forged event does not."""
    assert walk(build(tmp_path), 1, 0, 0, range(0, 400, 25))
    traces = judge(folder)
    assert len(traces) >= 3
    check_forgeries(traces)


def test_without_a_folder_nobody_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is replaced."""
    monkeypatch.delenv(TRACES, raising=False)
    before = CheckpointManager.restore
    assert trace(tmp_path, "nobody") is None
    assert CheckpointManager.restore is before


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_real_runs_conform(folder: Path, tmp_path: Path) -> None:
    """Each point of a save by one process and by two, of an incremental one, and of a branch:
    killed there, or its call failed; and managers on a server that speaks S3.
    """
    library = build(tmp_path)
    for error in (0, *ERRORS):
        walk(library, 1, 0, error, EVERY)
        walk_branch(library, error, EVERY)
    for error in (0, errno.EIO):
        walk(library, 1, 0, error, EVERY, incremental=True)
    for victim in (0, 1):
        walk(library, 2, victim, 0, range(victim, 400, 2))
    with s3_server() as query:
        for number in range(100):
            save_in_bucket(f"s3://{BUCKET}/run{number}{query}", number)
    traces = judge(folder)
    print(f"{len(traces)} traces of {sum(map(len, traces)):,} events conform")
    assert len(traces) >= 1000
    check_forgeries(traces)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_duels_and_power_cuts_conform(folder: Path) -> None:
    """Two managers that fight for each step of a root, and writers whose disk loses its power
    (where such a disk can be made).
    """
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-k", "winner or survives"]
    files = ["tests/system/test_duels.py", "tests/system/test_power_cut.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *files],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    traces = judge(folder)
    who = [{effect.who for effect in effects} for effects in traces]
    assert {"process 0", "process 1"} in who, done.stdout
    print(f"{len(traces)} traces of {sum(map(len, traces)):,} events conform")


def save_in_bucket(root: str, seed: int) -> None:
    """Saves, overwrites, restores and goes back, in an order of its own."""
    log = trace(root, "process 0")
    assert log is not None
    rng = random.Random(seed)
    for _ in range(2):
        with CheckpointManager(root, keep_policy=KeepLast(2)) as manager:
            for step in range((manager.latest_step() or 0) + 1, rng.randint(3, 6)):
                manager.save(step, {"w": np.full(rng.randint(1, 3000), step)}).wait()
            newest = manager.latest_step()
            assert newest is not None
            manager.save(newest, {"w": np.full(7, -newest)}, overwrite=True).wait()
            assert manager.restore()["w"][0] == -newest
            if len(manager.all_steps()) > 1:
                manager.restore(manager.all_steps()[0])
                manager.save(newest, {"w": np.full(7, 0)}).wait()
    log.close()
