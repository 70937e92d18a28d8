"""Ctrl-C at random moments of saves: no call hangs, what is listed is whole, what was acknowledged
is there, and the next save works.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

WAYS = ("manager", "managers", "oneshot", "convert")


@pytest.mark.parametrize(
    ("way", "saves"),
    [("manager", 60), *(pytest.param(way, 500, marks=pytest.mark.slow) for way in WAYS)],
)
def test_an_interrupt_at_a_random_moment(way: str, saves: int, tmp_path: Path) -> None:
    """A SIGINT in each save of a job; it looks at all it has after each."""
    command = [
        sys.executable,
        str(ROOT / "tests" / "support" / "interrupt_job.py"),
        way,
        str(tmp_path),
        str(saves),
        "0",
    ]
    done = subprocess.run(
        command,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    ends = json.loads(done.stdout)
    assert ends.get("interrupted", 0) > saves // 5 and set(ends) <= {"done", "interrupted"}, ends
