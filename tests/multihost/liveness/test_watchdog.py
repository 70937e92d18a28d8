"""The watchdog: a process without progress says where its threads are, also when its main thread
holds the GIL.
"""

from __future__ import annotations

import re
import time

import pytest

from holdfast.multihost import watchdog
from holdfast.multihost.liveness.watchdog import stacks
from tests.support.cluster import run_processes


def test_a_hang_is_logged_with_all_stacks_and_progress_ends_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One hang is reported once, with this function in the stacks; after progress the next is
    reported too.
    """
    errors: list[str] = []
    with watchdog(0.1) as dog:
        for hangs in (1, 2):
            while dog.statistics()["hangs"] < hangs or len(errors) < hangs:
                time.sleep(0.01)
                errors = [
                    record.getMessage() for record in caplog.records if record.levelname == "ERROR"
                ]
            dog.progress()
    assert "watchdog of 0.1 s" in errors[0] and "test_a_hang_is_logged_with_all_stacks" in errors[0]


def test_progress_keeps_it_quiet(caplog: pytest.LogCaptureFixture) -> None:
    """A block that gets on for much longer than the time-out is not reported."""
    with watchdog(5) as dog, watchdog(60):
        for _ in range(20):
            dog.progress()
    assert not caplog.records and dog.statistics()["hangs"] == 0


def test_a_time_out_has_to_be_above_zero() -> None:
    """A caller's mistake is a ValueError."""
    with pytest.raises(ValueError) as raised, watchdog(0):
        pass
    assert "expected a timeout_s above 0, found 0" in str(raised.value)


def test_the_stacks_name_the_threads() -> None:
    """Each thread is listed by its name, the main thread last."""
    assert re.findall(r"^Thread (.*):$", stacks(), re.MULTILINE)[-1] == "MainThread"


def test_it_ends_a_process_that_waits_for_ever_with_124() -> None:
    """With exit=True a process that sits in a lock ends with 124 and its stacks on stderr."""
    script = """
    import threading
    from holdfast.multihost import watchdog
    def the_guilty_function():
        threading.Event().wait()
    with watchdog(0.3, exit=True):
        the_guilty_function()
    """
    output = run_processes(script, 1, codes=[124])[0]
    assert "no progress for" in output and "the_guilty_function" in output and "exit 124" in output


def test_it_ends_a_process_whose_main_thread_holds_the_gil() -> None:
    """In a native call that holds the GIL no Python thread runs: the C timers write the stacks and
    end the process with 124.
    """
    script = """
    import ctypes
    from holdfast.multihost import watchdog
    def the_guilty_function():
        ctypes.PyDLL(None).sleep(100)
    with watchdog(0.5, exit=True):
        the_guilty_function()
    """
    output = run_processes(script, 1, codes=[124], timeout_s=60)[0]
    assert "Timeout (0:00:0" in output and "the_guilty_function" in output


def test_a_block_that_ends_in_time_leaves_no_timer() -> None:
    """After the block neither C timer is left to end the process or to write to the log."""
    script = """
    import time
    from holdfast.multihost import watchdog
    with watchdog(0.2, exit=True):
        pass
    time.sleep(0.6)
    """
    assert "Thread" not in run_processes(script, 1)[0]
