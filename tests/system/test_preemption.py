"""The preemption sync point on real processes: one step for all, whoever gets the notice, however
the loops differ.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from holdfast.coordination import CoordinationService, ServiceTimeouts, StatusClient
from tests.support.cluster import Processes, free_port, run_processes
from tests.support.metadata import Metadata, metadata_server
from tests.support.paths import program

LOOP = program("preemption_loop")


def stopped_at(output: str) -> list[int]:
    return [int(step) for step in re.findall(r"stopped at (-?\d+)", output)]


def signalled(seed: int) -> list[int]:
    """Returns who gets SIGTERM: one process, or for every third seed two of them."""
    return [seed % 4] + ([(seed + 1) % 4] if seed % 3 == 0 else [])


def give_notice(
    source: str, seed: int, processes: Processes, server: Metadata, folder: Path
) -> None:
    """Gives one process, or all, a notice from outside."""
    if source == "signal":
        for index in signalled(seed):
            processes.kill(index, signal.SIGTERM)
    elif source == "file":
        (folder / str(seed)).write_text("drain")
    elif source == "gce":
        server.values[f"{seed}/preempted"] = "TRUE"


def run_seeds(
    source: str, seeds: range, service: str, folder: Path, strides: list[int]
) -> list[str]:
    """Runs four processes with random step delays through `seeds`, gives each notice at a random
    time, and returns their outputs.

    `service` is "ours" (a coordinator of its own and `initialize()`) or "jaxlib's" (inside process
    0, with plain jax.distributed).
    """
    with metadata_server() as server, ExitStack() as stack:
        spawned = (
            stack.enter_context(CoordinationService.spawn(4, recoverable=True, survivable=True))
            if service == "ours"
            else None
        )
        address = spawned.address if spawned else f"127.0.0.1:{free_port()}"
        path = server.address if source == "gce" else folder
        arguments = [address, service, source, path, f"({seeds.start}, {seeds.stop})", strides]
        processes = stack.enter_context(Processes(LOOP, 4, arguments=arguments))
        for seed in seeds:
            for index in range(4):
                processes.wait_for(index, f"ready {seed}.", timeout_s=100)
            time.sleep(random.Random(seed).random() * 0.5)  # the random moment that this is about
            give_notice(source, seed, processes, server, folder)
        finished = processes.wait()
    assert [f.code for f in finished] == [0] * 4, "\n".join(f.output for f in finished)
    return [f.output for f in finished]


def test_sigterm_to_one_stops_all_at_once(tmp_path: Path) -> None:
    """A SIGTERM to one process makes all stop at the same step, also when they ask every 7 steps;
    the user's handler still runs.
    """
    outputs = run_seeds("signal", range(4, 6), "ours", tmp_path, [1, 7])
    steps = [stopped_at(output) for output in outputs]
    assert steps == [steps[0]] * 4 and len(steps[0]) == 2 and steps[0][1] % 7 == 0
    assert ["the user's handler ran" in output for output in outputs] == [True, True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("service", ["ours", "jaxlib's"])
@pytest.mark.parametrize("source", ["signal", "file", "gce", "slurm", "program"])
def test_seeds_of_each_source_stop_at_one_step(source: str, service: str, tmp_path: Path) -> None:
    """50 of 50 seeds for each source (25 on each service), four processes with random delays, every
    step and every 7: one step for all.
    """
    seeds = range(25) if service == "ours" else range(25, 50)
    outputs = run_seeds(source, seeds, service, tmp_path, [1, 7])
    steps = [stopped_at(output) for output in outputs]
    assert len(steps[0]) == 25 and steps == [steps[0]] * 4
    if source == "signal":
        assert [output.count("the user's handler ran") for output in outputs] == [
            sum(n in signalled(seed) for seed in seeds) for n in range(4)
        ]


@pytest.mark.slow
def test_processes_in_lockstep_collectives_stop_without_deadlock() -> None:
    """With a device collective in every step, which blocks main threads, all still agree, and no
    process passes the step.
    """
    script = program("preemption_processes_lockstep_collectives_stop")
    assert (
        len(
            {
                tuple(stopped_at(output))
                for output in run_processes(script, 3, arguments=[f"127.0.0.1:{free_port()}"])
            }
        )
        == 1
    )


def test_a_notice_before_step_0_holds_there() -> None:
    """Told before anybody asked, every process hears it at its first question."""
    script = program("preemption_notice_before_step_0")
    run_processes(script, 2, arguments=[f"127.0.0.1:{free_port()}"])


@pytest.mark.slow
def test_a_withdrawn_notice_ends_at_one_step() -> None:
    """Notices stand until all are withdrawn, the earliest deadline is everybody's, and then all
    answer False from one step on.
    """
    script = program("preemption_withdrawn_notice_ends_at")
    run_processes(script, 2, arguments=[f"127.0.0.1:{free_port()}"])


@pytest.mark.slow
def test_a_process_that_never_asks_is_named() -> None:
    """When one process has no sync point, the others' question ends with an error that names it."""
    script = program("preemption_process_never_asks_named")
    run_processes(script, 3, arguments=[f"127.0.0.1:{free_port()}"])


@pytest.mark.slow
def test_a_dead_announcer_is_taken_over() -> None:
    """A process that dies after announcing, before it sent any mail, does not hold the others up:
    they agree without it.
    """
    script = program("preemption_announcer_dies_half_way")
    with CoordinationService.spawn(
        3, timeouts=ServiceTimeouts(heartbeat_s=8), recoverable=True, survivable=True
    ) as service:
        outputs = run_processes(
            script, 3, arguments=[service.address], codes=[0, 0, -signal.SIGKILL]
        )
    assert stopped_at(outputs[0]) == stopped_at(outputs[1])


@pytest.mark.slow
def test_without_its_coordinator_a_process_still_answers() -> None:
    """With the coordinator dead, questions are answered at once; a notice then is no reason to stop
    alone, and is logged.
    """
    script = program("preemption_without_coordinator_process_still")
    with CoordinationService.spawn(
        2, timeouts=ServiceTimeouts(heartbeat_s=8), recoverable=True, survivable=True
    ) as service:
        with Processes(script, 2, arguments=[service.address]) as processes:
            processes.wait_for(0, "begun")
            os.kill(service.pid, signal.SIGKILL)
            processes.kill(1)
            finished = processes.wait()
    assert finished[0].code == 0 and "answered" in finished[0].output, finished[0].output


@pytest.mark.slow
def test_jax_own_sync_point_is_served_too() -> None:
    """A notice that JAX's C handler never saw reaches `reached_preemption_sync_point`, and one that
    only JAX got reaches ours.
    """
    script = program("preemption_jax_own_sync_point")
    for whose in ("ours", "theirs"):
        assert (
            len(
                {
                    tuple(stopped_at(output))
                    for output in run_processes(
                        script, 2, arguments=[f"127.0.0.1:{free_port()}", whose]
                    )
                }
            )
            == 1
        )


@pytest.mark.slow
def test_sigterm_reaches_both_sync_points() -> None:
    """With jax.distributed alone and its service on, asking ours is enough: a SIGTERM stops all at
    one step, and JAX's own is notified.
    """
    script = program("preemption_under_plain_jax_distributed")
    with Processes(script, 2, arguments=[f"127.0.0.1:{free_port()}"]) as processes:
        for index in range(2):
            processes.wait_for(index, "ready")
        processes.kill(1, signal.SIGTERM)
        finished = processes.wait()
    assert [f.code for f in finished] == [0, 0], "\n".join(f.output for f in finished)
    assert stopped_at(finished[0].output) == stopped_at(finished[1].output) != []


@pytest.mark.slow
def test_agree_on_step_spreads_the_primarys_clock_decision() -> None:
    """Rank 0 proposes again and again; each proposal is reached once, at the same step in every
    process, ahead of all.
    """
    script = program("preemption_agree_step_spreads_primarys")
    assert len(set(run_processes(script, 3, arguments=[f"127.0.0.1:{free_port()}"]))) == 1


SOURCES = program("preemption_sources")


def test_one_sync_point_has_all_sources_throughout() -> None:
    """What was added or asked before initialize() counts in the job, a late question is answered,
    and there is never a second one.
    """
    outputs = run_processes(SOURCES, 2, arguments=[f"127.0.0.1:{free_port()}"])
    assert len({tuple(stopped_at(output)) for output in outputs}) == 1


LEAVING = program("preemption_leaving")


@pytest.mark.parametrize("notified", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_notice_while_some_leave_is_agreed_on(notified: int) -> None:
    """Process 0 waits in shutdown(), 1 and 2 still ask: a SIGTERM to one that waits, or asks, stops
    both at one step; nobody dies of it.
    """
    outputs = notify_while_leaving(notified, ("leaving", "asking", "asking"), shutdown_s=60)
    assert "left" in outputs[0]


@pytest.mark.slow
def test_a_notice_after_some_left_is_agreed_on() -> None:
    """Process 0 did not wait for the others, and is gone: the agreement does not wait for it."""
    notify_while_leaving(1, ("left", "asking", "asking"), shutdown_s=0.1)


def notify_while_leaving(notified: int, marks: Sequence[str], shutdown_s: float) -> list[str]:
    """Sends SIGTERM once each process has printed its mark, and returns what all have printed:
    those that ask stop at one step.
    """
    with Processes(LEAVING, 3, arguments=[f"127.0.0.1:{free_port()}", shutdown_s]) as processes:
        for index, text in enumerate(marks):
            processes.wait_for(index, text)
        processes.kill(notified, signal.SIGTERM)
        finished = processes.wait()
    outputs = [each.output for each in finished]
    assert [each.code for each in finished] == [0, 0, 0], "\n".join(outputs)
    assert (
        stopped_at(outputs[1]) == stopped_at(outputs[2]) != []
        and 10 < stopped_at(outputs[1])[0] < 200
    ), outputs
    return outputs


def status_of(service: CoordinationService) -> list[Any]:
    with StatusClient(service.address) as client:
        return list(client.status().tasks)


STARTING = program("preemption_starting")


def test_a_sigterm_before_all_joined_ends_the_process() -> None:
    """As it would have without us: nobody counts on it yet, and who launched it reads that as a
    preemption.
    """
    script = program("preemption_waiting")
    with CoordinationService.spawn(2, recoverable=True, survivable=True) as service:
        with Processes(script, 1, arguments=[service.address]) as processes:
            processes.wait_for(0, "waiting")
            while not any(task.has_session for task in status_of(service)):
                time.sleep(0.01)
            processes.kill(0, signal.SIGTERM)
            (finished,) = processes.wait()
    assert finished.code == -signal.SIGTERM, finished.output


def test_a_sigterm_that_is_repeated_in_the_last_save_ends_nothing() -> None:
    """A process that waits for its saves in shutdown() is not stuck."""
    script = program("preemption_repeated_in_last_save")
    run_processes(script, 2, arguments=[f"127.0.0.1:{free_port()}"])


def test_a_sigterm_in_initialize_is_a_later_notice() -> None:
    """While jax starts, twice: the process lives, and all stop at one step."""
    outputs = run_processes(STARTING, 2, arguments=[f"127.0.0.1:{free_port()}"])
    assert len({tuple(stopped_at(output)) for output in outputs}) == 1
