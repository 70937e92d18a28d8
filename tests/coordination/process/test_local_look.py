"""A look at a process of this host: stopped, held by C code, running; and nobody else's process is
touched.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.coordination.diagnosis.findings import Look
from holdfast.coordination.diagnosis.stacks import parse
from holdfast.coordination.process.local_look import look
from holdfast.coordination.vitals import vitals_file
from tests.support.paths import program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs memfd_create and /proc")


@pytest.fixture(scope="module")
def popen() -> Iterator[subprocess.Popen[str]]:
    """A process with vitals, in a function that waits for a line."""
    command = [sys.executable, str(program("held_interpreter"))]
    popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert popen.stdout is not None and popen.stdout.readline() == "there\n"
    with popen:
        _look_until(popen, lambda found: found.runs)
        yield popen
        popen.kill()


def _look_until(popen: subprocess.Popen[str], wanted: Callable[[Look], bool]) -> Look:
    deadline = time.monotonic() + 60
    while (found := look(5, popen.pid)) is None or not wanted(found):
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found


def test_a_process_that_runs_answers_with_its_stacks(popen: subprocess.Popen[str]) -> None:
    """As often as it is asked; thread names and source are there."""
    for _ in range(2):
        found = look(5, popen.pid)
        assert found is not None and found.runs
        main, *others = parse(found.stacks)
        assert main.frames[-1].function == "the_innocent_function" and {"holdfast-vitals"} <= {
            thread.name for thread in others
        }


def test_a_stopped_process_is_stopped(popen: subprocess.Popen[str]) -> None:
    """The kernel says so; nothing is asked of it."""
    os.kill(popen.pid, signal.SIGSTOP)
    try:
        os.waitid(os.P_PID, popen.pid, os.WSTOPPED | os.WNOWAIT)
        found = look(5, popen.pid)
        assert found is not None and found.stopped
    finally:
        os.kill(popen.pid, signal.SIGCONT)


def test_another_process_is_not_touched(popen: subprocess.Popen[str]) -> None:
    """One without vitals, one of another number, and one that is gone are not looked at."""
    assert look(5, os.getpid()) is None and look(4, popen.pid) is None
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert look(5, gone.pid) is None


_ENDS_WHEN_ASKED = f"""
import os, time
vitals = os.memfd_create("{vitals_file(5, 1)}")
print("there", flush=True)
while os.pread(vitals, 1, 0) != b"?":
    os.utime(vitals)
    time.sleep(0.01)
"""


def test_a_process_that_ends_meanwhile_is_not_there() -> None:
    """One that was there as the look began, and ends instead of an answer."""
    with (
        subprocess.Popen([sys.executable, "-c", _ENDS_WHEN_ASKED], stdout=subprocess.PIPE) as ends,
        ThreadPoolExecutor(1) as pool,
    ):
        assert ends.stdout is not None and ends.stdout.readline() == b"there\n"
        code = pool.submit(ends.wait)
        assert look(5, ends.pid) is None
        assert code.result(0) == 0


def test_a_held_interpreter_answers_from_c(popen: subprocess.Popen[str]) -> None:
    """For how long, and the line that called into C; it goes on as if nothing had been asked."""
    assert popen.stdin is not None and popen.stdout is not None
    popen.stdin.write("go\n")
    popen.stdin.flush()
    assert popen.stdout.readline() == "held\n"
    found = _look_until(popen, lambda found: found.held_s is not None)
    main = parse(found.stacks)[0]
    assert (
        main.frames[-1].function == "the_guilty_function"
        and (found.held_s or 0) >= 1.9
        and popen.poll() is None
    )
