"""The watchdog: a process without progress says where its threads are, also when its main thread holds the GIL."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time

import pytest

from holdfast.coordination import CoordinationService
from holdfast.multihost import watchdog
from holdfast.multihost.liveness.watchdog import stacks
from tests.support.cluster import Processes, run_processes


def test_a_hang_is_logged_with_all_stacks_and_progress_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    """One hang is reported once, with this function in the stacks; after progress the next is reported too."""
    errors: list[str] = []
    with watchdog(0.1) as dog:
        for hangs in (1, 2):
            while dog.statistics()["hangs"] < hangs or len(errors) < hangs:
                time.sleep(0.01)
                errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
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
    """In a native call that holds the GIL no Python thread runs: the C timers write the stacks and end the process with 124."""
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


def test_the_stacks_stay_with_the_coordinator() -> None:
    """A process that ends in a hang has left its stacks, and why, where the others and `holdfast status` find them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    script = """
    import sys, time
    import jax
    from holdfast.multihost import watchdog
    index = int(sys.argv[1])
    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(sys.argv[3], 2, index)
    if index == 1:
        with watchdog(0.3, exit=True):
            time.sleep(100)
    print(jax._src.distributed.global_state.client.blocking_key_value_get("holdfast/stacks/1", 60_000), flush=True)
    """
    with Processes(script, 2, arguments=[address]) as processes:
        processes.wait_for(0, "stacks")
        found = json.loads(next(line for line in processes.output(0).splitlines() if line.startswith("{")))
        processes.popens[1].wait(60)
    assert "no progress for" in found["why"] and "time.sleep(100)" in found["stacks"]
    assert processes.popens[1].returncode == 124


def test_status_shows_the_stacks_of_the_living_and_what_the_dead_have_left() -> None:
    """`holdfast status --stacks` asks each living process where its threads are, and shows the report of one that its watchdog ended."""
    script = """
    import sys, threading
    from holdfast import multihost
    index = int(sys.argv[1])
    multihost.initialize(sys.argv[3], 2, index)
    def the_innocent_function():
        print("waiting", flush=True)
        threading.Event().wait()
    def the_guilty_function():
        with multihost.watchdog(0.3, exit=True):
            threading.Event().wait()
    the_guilty_function() if index else the_innocent_function()
    """
    with CoordinationService.spawn(2, recoverable=True, survivable=True) as service:
        with Processes(script, 2, arguments=[service.address]) as processes:
            processes.wait_for(0, "waiting")
            assert processes.popens[1].wait(60) == 124
            command = [sys.executable, "-c", "from holdfast.cli import main; main()", "status", service.address, "--stacks"]
            shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    living, dead = shown.split("--- process 1\n")
    assert living.startswith("--- process 0\n") and "the_innocent_function" in living
    assert "Left by its watchdog: no progress for" in dead and "the_guilty_function" in dead
