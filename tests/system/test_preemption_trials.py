"""A SIGTERM at any moment of a job's life, from before initialize() into shutdown(): one story on
all processes.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_story_whenever_the_signal_comes() -> None:
    """24 trials: six moments, strides 1 and 7, one slow process, one or two signalled, some twice.
    (RESULTS-multihost.md has 300.)
    """
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.preemption_trials", "0", "24"],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert ran.returncode == 0 and "24 of 24 trials have one story" in ran.stdout, (
        ran.stdout[-20_000:] + ran.stderr[-5_000:]
    )
    assert ran.stdout.count("in a save, in flight on all") >= 2, (
        ran.stdout
    )  # of 4: a short job may have no save that lasts
