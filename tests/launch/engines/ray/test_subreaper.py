"""The engine of Ray where each raylet adopts and ends what its workers leave behind: it sets
SIGCHLD to what Python's own waiting for children does not survive.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.libraries import need
from tests.support.ray_fleet import Fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(290), pytest.mark.filterwarnings("ignore")]
if os.environ.get("CI") != "true":
    need("ray", "make slow-libraries")

_PR_SET_CHILD_SUBREAPER = 36
ENDS = """
import os, signal, sys
print("SIGCHLD", signal.getsignal(signal.SIGCHLD))
code = int(sys.argv[1]) if os.environ["HOLDFAST_PROCESS_ID"] == "1" else 0
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setenv("RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper", "true")
    fleet = Fleet(__name__)
    fleet.become([{}] * 2)
    # Ray ignores it in this process too, where subprocess would take each end for a success.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield fleet
    fleet.close()
    # Ray had this process adopt orphans, which nobody here would wait for.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def test_how_a_process_ended_is_known(fleet: Fleet) -> None:
    """With an exit code, by a signal, and well: none of them is taken for another."""
    for code, expected in ((3, 3), (-9, 137), (0, 0)):
        holdfast = Path(sys.executable).parent / "holdfast"
        command = [holdfast, "ray", "--address", fleet.address, "-n", "2", "--max-restarts", "0"]
        done = subprocess.run(
            [*command, "--", sys.executable, "-c", ENDS, str(code)],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == expected, done.stdout + done.stderr
        assert ("holdfast: finished" in done.stderr) == (code == 0), done.stderr
        assert "SIGCHLD 0" in done.stdout, done.stdout  # the default
