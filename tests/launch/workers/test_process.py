"""Worker processes and the reaper of process groups, on real processes."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.launch.workers.process import ProcessGroupReaper, WorkerProcess
from tests.support.processes import runs, wait_until_ended

# An expression: a process in the background that holds no stream open.
SLEEPER = "subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)"


@pytest.fixture
def reaper() -> Iterator[ProcessGroupReaper]:
    found = ProcessGroupReaper()
    yield found
    found.close()


class Started:
    """A worker process whose lines and exit code a test takes in order."""

    def __init__(self, code: str, reaper: ProcessGroupReaper, **env: str) -> None:
        self.events: queue.Queue[str | int] = queue.Queue()
        command = [sys.executable, "-S", "-c", code]
        self.process = WorkerProcess(
            command, os.environ | env, reaper, on_line=self.events.put, on_exit=self.events.put, cwd=Path(__file__).parent
        )

    def next(self) -> str | int:
        return self.events.get(timeout=30)


def test_lines_of_both_streams_come_before_the_exit_code(reaper: ProcessGroupReaper) -> None:
    """Environment and folder are as given; the last line comes before the exit code, also without a newline."""
    code = """
import os, sys
print(os.environ["GREETING"], os.path.basename(os.getcwd()), flush=True)
sys.stderr.write("last")
sys.exit(3)
"""
    started = Started(code, reaper, GREETING="hello")
    assert [started.next() for _ in range(3)] == ["hello workers", "last", 3]
    assert started.process.wait(10) and not started.process.alive


def test_a_signal_reaches_the_process_and_its_number_comes_back(reaper: ProcessGroupReaper) -> None:
    """`signal` is for the process alone, `kill` for all of its group; both do nothing afterwards."""
    started = Started("import signal; print('ready', flush=True); signal.pause()", reaper)
    assert started.next() == "ready" and started.process.alive
    assert not started.process.wait(0)
    started.process.signal(signal.SIGTERM)
    assert started.next() == -signal.SIGTERM
    started.process.signal(signal.SIGTERM)
    started.process.kill()


def test_a_signal_at_the_very_end_of_a_process_loses_no_exit_code(reaper: ProcessGroupReaper) -> None:
    """Only the waiter reaps: a process that is signalled again and again while it ends is reported all the same."""
    for _ in range(10):
        started = Started("import signal; signal.signal(15, signal.SIG_IGN)", reaper)
        while started.process.alive:
            started.process.signal(signal.SIGTERM)
        assert started.next() in (0, -signal.SIGTERM)


def test_what_it_started_is_killed_with_it(reaper: ProcessGroupReaper) -> None:
    """A background process of its group is gone when the exit code is reported."""
    started = Started(f"import subprocess; print({SLEEPER}.pid)", reaper)
    pid, code = int(started.next()), started.next()
    assert code == 0
    assert wait_until_ended([pid])


def test_kill_ends_a_process_that_ignores_sigterm_and_its_group(reaper: ProcessGroupReaper) -> None:
    """SIGKILL reaches the process and what it started."""
    code = f"""
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print({SLEEPER}.pid, flush=True)
while True: signal.pause()
"""
    started = Started(code, reaper)
    pid = int(started.next())
    started.process.signal(signal.SIGTERM)
    started.process.kill()
    assert started.next() == -signal.SIGKILL
    assert wait_until_ended([pid])


def test_the_reaper_kills_what_is_listed_and_spares_what_is_not() -> None:
    """When it is closed, groups that were added and not discarded get SIGKILL."""
    reaper = ProcessGroupReaper()
    kept, spared = (subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(2))
    for popen in (kept, spared):
        reaper.add(popen.pid)
    reaper.discard(spared.pid)
    reaper.close()
    assert kept.wait(30) == -signal.SIGKILL
    assert runs(spared.pid)
    spared.kill()
    spared.wait(30)
