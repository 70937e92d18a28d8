"""A process forks in every phase of a save: the child ends at once, and the parent's save is as if
nothing had been.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.killpoints import build
from tests.support.paths import SUPPORT

FEWEST_PHASES = 40


@pytest.mark.parametrize(
    ("way", "every"),
    [
        ("saving", 10),
        *(
            pytest.param(way, 1, marks=pytest.mark.slow)
            for way in ("saving", "beginning", "oneshot")
        ),
    ],
)
def test_a_fork_in_every_phase_of_a_save(way: str, every: int, tmp_path: Path) -> None:
    """At each system call of the threads that save, at each line of `save`, and at each system call
    of a one-shot save.
    """
    job = [sys.executable, str(SUPPORT / "fork_job.py"), way, str(tmp_path / "root"), str(every)]
    environment = {**os.environ, "LD_PRELOAD": str(build(tmp_path)), "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        job, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as ran:
        try:
            said, wrong = ran.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            ran.send_signal(signal.SIGABRT)  # faulthandler shows where it stands
            said, wrong = ran.communicate()
    assert ran.returncode == 0, wrong[-6000:]
    print(f"{json.loads(said)} forks")
    assert json.loads(said) * every > FEWEST_PHASES, "the walk did not come to the end of the save"
