"""Jobs that stand still: the launcher sees it by the steps, says who keeps the others waiting and
where, and ends the attempt as a hang.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.launch import (
    Hang,
    RestartPolicy,
    RunSettings,
    StandbySettings,
    StartupFailed,
    run_local,
)
from tests.support.cluster import CollectedOutput
from tests.support.drill import HOLDFAST, drill, line_of
from tests.support.paths import program

STALL_S = 10
SCREEN = 25
"""Lines."""
WHO = f"process 2 (host {socket.gethostname()})"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("loader", f"{WHO} is in load_batch, train.py:{line_of('LOADER')}; the other 2 wait in "),
        (
            "gil",
            (
                f"{WHO} is in load_batch, train.py:{line_of('GIL')}, in C code that holds its"
                " interpreter for "
            ),
        ),
        ("skip", f"{WHO} waits in sync_global_processes at train, train.py:{line_of('BARRIER')}"),
    ],
)
def test_a_hang_ends_the_attempt_by_name(fault: str, said: str, tmp_path: Path) -> None:
    """Within the timeout and 10 s after the fault the job has ended with 124; the log's first
    screen has the process and its line.
    """
    with drill(tmp_path, f"--stall-timeout-s={STALL_S}") as job:
        job.wait_for_step(10)
        job.begin(fault)
        began = time.monotonic()
        assert job.job is not None
        assert job.job.wait(120) == 124
        took_s = time.monotonic() - began
    log = [
        line
        for line in (tmp_path / "run.log").read_text().splitlines()
        if line.startswith("holdfast: ")
    ]
    print(f"{fault}: ended {took_s:.1f} s after the fault, with a timeout of {STALL_S} s; {log[1]}")
    screen = (tmp_path / "run.log").read_text().splitlines()[:SCREEN]
    assert any(line.startswith(f"holdfast: hang: {said}") for line in screen), screen
    assert any(
        re.match("holdfast: failed: attempt 1 hangs: no process has made a step for ", line)
        for line in log
    ), log


HANGS_ONCE = program("stalls_hangs_once")


@pytest.mark.slow
def test_an_attempt_that_hangs_is_followed_by_another(tmp_path: Path) -> None:
    """Its processes are gone, their place is said, and the next attempt does what is left."""
    (script := tmp_path / "train.py").write_text(HANGS_ONCE.read_text())
    output = CollectedOutput()
    restart = RestartPolicy(max_failures=1, stall_timeout_s=4, backoff_s=0)
    settings = RunSettings(restart=restart, standby=StandbySettings(wanted=False))
    result = run_local([sys.executable, str(script)], 2, settings, output=output)
    assert (result.outcome, result.attempts) == ("done", 2), output.text
    assert any(
        "process 1 " in line and "<module>, train.py:16" in line
        for line in output.said
        if line.startswith("hang: ")
    ), output.text
    assert any(
        'File "' in line and "train.py" in line
        for line in output.said
        if line.startswith("stacks of process 1:")
    ), output.text


def test_a_stall_rule_without_steps_is_refused() -> None:
    """Of a program that reports none: the job ends, with what to add, and no second attempt."""
    output = CollectedOutput()
    restart = RestartPolicy(max_failures=5, stall_timeout_s=1, startup_timeout_s=1.5)
    result = run_local(
        [sys.executable, "-S", "-c", "import time; time.sleep(600)"],
        2,
        RunSettings(restart=restart),
        output=output,
    )
    assert (result.outcome, result.exit_code, result.attempts) == ("failed", 1, 1)
    assert isinstance(result.error, StartupFailed) and not isinstance(result.error, Hang)
    assert str(result.error).startswith(
        "no process has reported a step within 1.5 s of its start: stall_timeout_s goes by steps;"
        " call "
    )


def test_a_timeout_that_cannot_be_is_refused() -> None:
    """By the command line, before anything starts."""
    command = [*HOLDFAST, "run", "-n", "1", "--stall-timeout-s", "0", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2 and "--stall-timeout-s" in done.stderr
