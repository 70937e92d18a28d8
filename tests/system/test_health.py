"""Health: a dead process is reported to everybody, ends every wait of ours that needs it, and
leaves survivors that can go on.
"""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest

from holdfast.coordination import (
    CoordinationClient,
    CoordinationService,
    JobIdentity,
    ServiceTimeouts,
    StatusClient,
    Timeouts,
)
from tests.support.cluster import Processes, run_processes
from tests.support.paths import program

HEARTBEAT_S = 6.0


WAITS = ("barrier", "blocking get", "gather", "broadcast", "global_max", "save")
KILLED = program("health_killed")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [False, True], ids=["nobody saw it", "a launcher saw it"])
@pytest.mark.parametrize("wait", WAITS)
def test_sigkill_of_one_ends_every_wait_by_name(wait: str, launcher: bool, tmp_path: Path) -> None:
    """Every survivor gets an error naming the process within heartbeat timeout + 2 s, or long
    before one of 100 s where a launcher reports the exit; later work is refused; survivors compute
    on.
    """
    heartbeat_s = 100.0 if launcher else HEARTBEAT_S
    grace = ("--reconnect-grace-s=100",) if launcher else ()
    with CoordinationService.spawn(
        4,
        timeouts=ServiceTimeouts(heartbeat_s=heartbeat_s),
        recoverable=True,
        survivable=True,
        arguments=grace,
    ) as service:
        with Processes(
            KILLED,
            4,
            arguments=[service.address, heartbeat_s, wait, tmp_path / "checkpoints"],
        ) as processes:
            processes.wait_for(3, "ready")
            for index in range(3):
                processes.wait_for(index, "waiting")
            killed_at = time.time()
            processes.kill(3, signal.SIGKILL)
            if launcher:
                with StatusClient(service.address) as status:
                    status.report_exit(3, -signal.SIGKILL)
            finished = processes.wait()
    report = "\n".join(
        f"--- process {i} (exit {f.code}):\n{f.output}" for i, f in enumerate(finished)
    )
    assert [f.code for f in finished] == [0, 0, 0, -signal.SIGKILL], report
    for survivor in finished[:3]:
        found = re.search(r"^failed (.*)$", survivor.output, re.MULTILINE)
        assert found, report
        failed_at, _, process, message = json.loads(found[1])
        print(f"{wait}: the error came {failed_at - killed_at:.2f} s after SIGKILL: {message}")
        assert process == 3 or "process 3" in message, report
        assert failed_at - killed_at <= (heartbeat_s / 10 if launcher else HEARTBEAT_S + 2), report
        assert "refused 3" in survivor.output, report
        assert "went on with 3 [0, 1, 2]" in survivor.output, report


BLOCKS = program("health_blocks")


def test_a_block_that_fails_fails_in_all() -> None:
    """The process that raised gets its own error, the others one that names it; the next block
    begins afresh and ends well.
    """
    with CoordinationService.spawn(3, recoverable=True, survivable=True) as service:
        outputs = run_processes(BLOCKS, 3, arguments=[service.address, 100])
    assert "KeyError: 'mine'" in outputs[1]
    for index in (0, 2):
        assert (
            "CoordinationError: ABORTED: the block failed in process 1: KeyError: 'mine'"
            in outputs[index]
        )
    assert all("3 devices\n[0, 1, 2]" in output for output in outputs)


@pytest.mark.slow
def test_a_wait_for_the_living_names_who_lacks() -> None:
    """`live_processes` that ends with its time names the living processes that did not call it."""
    with CoordinationService.spawn(3, recoverable=True, survivable=True) as service:
        outputs = run_processes(
            program("health_one_never_asks"), 3, arguments=[service.address, 100]
        )
    assert "live_processes (1, 2) DEADLINE_EXCEEDED: 1 of 3 asked who is alive" in outputs[0]
    assert "waited 0.5 s" in outputs[0]


@pytest.mark.slow
def test_a_block_that_one_never_ended_fails() -> None:
    """A process that came to the exit and said nothing of this block did not end it well: the
    others get an error that names it.
    """
    with CoordinationService.spawn(2, recoverable=True, survivable=True) as service:
        outputs = run_processes(
            program("health_ends_no_block"), 2, arguments=[service.address, 100]
        )
    why = "it did not come to the end of this block"
    assert f"ABORTED: the block failed in process 1: {why}" in outputs[0]


@pytest.mark.slow
def test_a_death_inside_a_block_ends_it_everywhere() -> None:
    """A process killed inside a block, in front of a collective: all survivors raise ProcessLost
    naming it, and compute on without it.
    """
    script = program("health_death_inside_block_ends")
    with CoordinationService.spawn(
        3, timeouts=ServiceTimeouts(heartbeat_s=HEARTBEAT_S), recoverable=True, survivable=True
    ) as service:
        with Processes(script, 3, arguments=[service.address, HEARTBEAT_S]) as processes:
            for index in range(3):
                processes.wait_for(index, "inside")
            processes.kill(2)
            finished = processes.wait()
    for survivor in finished[:2]:
        assert survivor.code == 0, survivor.output
        assert "lost 2" in survivor.output and "went on with 2" in survivor.output


@pytest.mark.slow
def test_a_dead_process_delays_no_agreement() -> None:
    """After one of three was killed, the others still agree on a step through `agree_on_step`,
    without it.
    """
    script = program("health_dead_process_does_not")
    with CoordinationService.spawn(
        3, timeouts=ServiceTimeouts(heartbeat_s=HEARTBEAT_S), recoverable=True, survivable=True
    ) as service:
        with Processes(script, 3, arguments=[service.address, HEARTBEAT_S]) as processes:
            for index in range(3):
                processes.wait_for(index, "begun")
            processes.kill(2)
            finished = processes.wait()
    assert all("agreed" in survivor.output for survivor in finished[:2]), "\n".join(
        f.output for f in finished
    )


def test_work_with_an_unseen_new_life_is_refused() -> None:
    """A process that was killed and started again is connected; work planned with its old life is
    refused until `live_processes()`.
    """
    script = program("health_work_with_restarted_process")
    with CoordinationService.spawn(2, recoverable=True, survivable=True) as service:
        with Processes(script, 2, arguments=[service.address, 100]) as processes:
            for index in range(2):
                processes.wait_for(index, "begun")
            processes.kill(1)
            processes.popens[1].wait()
            with CoordinationClient(
                service.address,
                1,
                job=JobIdentity(num_processes=2),
                timeouts=Timeouts(shutdown_s=1),
            ) as again:
                processes.wait_for(0, "refused 1")
                assert sorted(again.get_live_nodes([0, 1])) == [0, 1]
                processes.wait_for(0, "alive [0, 1] refused {}")
                again.close()
