"""A clock that leaves out the time in which its process stood still."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from holdfast.checkpoint.peers.running_clock import STOOD_S, RunningClock


def test_a_long_gap_between_looks_does_not_count() -> None:
    """It is one standstill; shorter gaps are time like any other."""
    now_s = [10.0]
    clock = RunningClock(lambda: now_s[0])
    now_s[0] += STOOD_S
    assert clock() == 10.0 + STOOD_S
    assert clock.standstills() == 0
    now_s[0] += 30.0
    assert clock() == 10.0 + STOOD_S
    assert clock.standstills() == 1
    now_s[0] += 1.0
    assert clock() == 11.0 + STOOD_S
    assert clock.standstills() == 1


STOPPED = """
import sys, time
from holdfast.checkpoint.peers.running_clock import RunningClock
clock = RunningClock()
clock.start()
print(clock(), flush=True)
sys.stdin.readline()
print(clock.standstills(), clock(), flush=True)
"""


def test_a_stopped_process_finds_out() -> None:
    """A process that was stopped counts the standstill, and not its time."""
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        before_s = float(process.stdout.readline())
        os.kill(process.pid, signal.SIGSTOP)
        began_s = time.monotonic()
        time.sleep(STOOD_S + 1.0)
        stopped_s = time.monotonic() - began_s
        os.kill(process.pid, signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()
        count, after_s = process.stdout.readline().split()
    assert int(count) == 1
    assert float(after_s) - before_s < stopped_s - 2.0
