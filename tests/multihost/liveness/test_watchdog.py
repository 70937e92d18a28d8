"""The watchdog: a process without progress says where its threads are, also when its main thread
holds the GIL.
"""

from __future__ import annotations

import logging
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from holdfast.coordination.vitals import stacks
from holdfast.multihost import HANG_EXIT_CODE, job, watchdog
from holdfast.multihost.liveness.watchdog import progress
from tests.support.cluster import run_processes
from tests.support.paths import program


class Errors(logging.Handler):
    """Hands on the errors that are logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: queue.Queue[str] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.put(record.getMessage())


@pytest.fixture
def errors() -> Iterator[Errors]:
    """The errors of the watchdog."""
    handler = Errors()
    logger = logging.getLogger("holdfast.multihost.liveness.watchdog")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_a_hang_is_logged_until_progress(errors: Errors) -> None:
    """One hang is reported once, with this function in the stacks; after progress the next is
    reported too.
    """
    with watchdog(0.1) as dog:
        for hangs in (1, 2):
            text = errors.texts.get(timeout=30)
            assert "watchdog of 0.1 s" in text and "test_a_hang_is_logged_until_progress" in text
            assert dog.statistics()["hangs"] == hangs
            dog.progress()


def test_a_pause_is_no_hang(errors: Errors) -> None:
    """Within a pause no hang is reported, however long it is, and after it the next one is."""
    with watchdog(0.2) as dog:
        with dog.paused():
            time.sleep(0.6)
        assert dog.hangs == 0
        errors.texts.get(timeout=30)
        assert dog.hangs == 1


class SlowLog(logging.Handler):
    """A log that takes its time for each record."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.begun = threading.Event()
        self.written: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.begun.set()
        time.sleep(0.3)
        self.written.append(record.getMessage())


def test_no_report_comes_after_the_block() -> None:
    """A report that is being written when the block ends is waited for: one that came later would
    seem to be about what the program does then.
    """
    handler = SlowLog()
    logger = logging.getLogger("holdfast.multihost.liveness.watchdog")
    logger.addHandler(handler)
    with watchdog(0.05):
        assert handler.begun.wait(30)
    logger.removeHandler(handler)
    assert len(handler.written) == 1


def test_progress_keeps_it_quiet(caplog: pytest.LogCaptureFixture) -> None:
    """A block that gets on within the time-out is not reported."""
    with watchdog(5) as dog, watchdog(60):
        for _ in range(20):
            dog.progress()
    assert not caplog.records and dog.statistics()["hangs"] == 0


def test_it_hears_of_progress_in_the_next_job(errors: Errors) -> None:
    """A process that outlives its attempt joins another job, and its watchdogs stay."""
    with watchdog(0.5) as dog:
        job.forget_job()
        end_s = time.monotonic() + 1.5
        while time.monotonic() < end_s:
            progress()
            time.sleep(0.01)
        assert dog.hangs == 0


FORKS = """
import os
from holdfast.multihost import watchdog
with watchdog(0.2):
    child = os.fork()
    if not child:
        with watchdog(60):
            pass
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


def test_a_forked_child_watches_too() -> None:
    """The thread of faulthandler's that its parent's watchdogs have is not there to wait for."""
    command = [sys.executable, "-W", "ignore", "-c", FORKS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_time_out_has_to_be_above_zero() -> None:
    """A caller's mistake is a ValueError."""
    with pytest.raises(ValueError) as raised, watchdog(0):
        pass
    assert "expected a timeout_s above 0, found 0" in str(raised.value)


def test_the_stacks_name_the_threads() -> None:
    """Each thread is listed by its name, the main thread last."""
    assert re.findall(r"^Thread (.*):$", stacks(), re.MULTILINE)[-1] == "MainThread"


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("waits", ["no progress for", "the_guilty_function", "exit 124"]),
        pytest.param(
            "holds the GIL", ["Timeout (0:00:0", "the_guilty_function"], marks=pytest.mark.slow
        ),
    ],
)
def test_it_ends_a_hanging_process_with_124(case: str, expected: list[str]) -> None:
    """A process that sits in a lock ends with 124 and its stacks on stderr. In a native call that
    holds the GIL no Python thread runs: there the C timers write the stacks and end the process.
    """
    (output,) = run_processes(
        program("hang"), 1, arguments=[case], codes=[HANG_EXIT_CODE], timeout_s=60
    )
    assert all(line in output for line in expected), output


def test_a_block_that_ends_leaves_no_timer() -> None:
    """After the block neither C timer is left to end the process or to write to the log."""
    assert "Thread" not in run_processes(program("hang"), 1, arguments=["ends in time"])[0]
