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

PROGRAM = program("preempted_job")


def run_case(case: str, count: int, *own: object) -> list[str]:
    """Runs a case of the program without a coordinator of ours; returns what all have printed."""
    return run_processes(PROGRAM, count, arguments=[f"127.0.0.1:{free_port()}", case, *own])


def assert_one_stop(outputs: Sequence[str]) -> None:
    """Asserts that all processes stopped at the same steps."""
    stops = [stopped_at(output) for output in outputs]
    assert stops[0] and stops == [stops[0]] * len(stops), outputs


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
        arguments = [address, "seeds", service, source, path, seeds.start, seeds.stop, *strides]
        processes = stack.enter_context(Processes(PROGRAM, 4, arguments=arguments))
        for seed in seeds:
            for index in range(4):
                processes.wait_for(index, f"ready {seed}.", timeout_s=100)
            time.sleep(random.Random(seed).random() * 0.5)  # the random moment that this is about
            give_notice(source, seed, processes, server, folder)
        finished = processes.wait()
    assert [f.code for f in finished] == [0] * 4, "\n".join(f.output for f in finished)
    return [f.output for f in finished]


def test_sigterm_to_one_of_four_stops_all(tmp_path: Path) -> None:
    """A SIGTERM to one process makes all stop at the same step, also when they ask every 7 steps;
    the user's handler still runs.
    """
    outputs = run_seeds("signal", range(4, 6), "ours", tmp_path, [1, 7])
    steps = [stopped_at(output) for output in outputs]
    assert steps == [steps[0]] * 4 and len(steps[0]) == 2 and steps[0][1] % 7 == 0
    assert ["user's handler ran" in output for output in outputs] == [True, True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("service", ["ours", "jaxlib's"])
@pytest.mark.parametrize("source", ["signal", "file", "gce", "slurm", "program"])
def test_seeds_of_each_source_stop_alike(source: str, service: str, tmp_path: Path) -> None:
    """50 of 50 seeds for each source (25 on each service), four processes with random delays, every
    step and every 7: one step for all.
    """
    seeds = range(25) if service == "ours" else range(25, 50)
    outputs = run_seeds(source, seeds, service, tmp_path, [1, 7])
    steps = [stopped_at(output) for output in outputs]
    assert len(steps[0]) == 25 and steps == [steps[0]] * 4
    if source == "signal":
        assert [output.count("user's handler ran") for output in outputs] == [
            sum(n in signalled(seed) for seed in seeds) for n in range(4)
        ]


@pytest.mark.parametrize(
    ("case", "count", "own"),
    [
        ("lockstep", 3, []),
        ("jax_service", 2, ["ours"]),
        ("jax_service", 2, ["theirs"]),
        ("early_source", 2, []),
        ("starting", 2, []),
    ],
)
def test_all_stop_at_one_step(case: str, count: int, own: list[str]) -> None:
    """With a device collective in every step, which blocks main threads. Where JAX's own service
    was left on: a notice that its C handler never saw reaches it, and one that it alone got reaches
    ours. With sources and questions from before initialize(), and a late question. With SIGTERM
    twice while jax starts, once all have joined.
    """
    assert_one_stop(run_case(case, count, *own))


@pytest.mark.parametrize("case", ["before_step_0", "withdrawn"])
def test_a_notice_holds_while_it_stands(case: str) -> None:
    """Told before anybody asked, every process hears it at its first question. Notices stand until
    all are withdrawn, the earliest deadline is everybody's, and then all answer False from one step
    on.
    """
    run_case(case, 2)


@pytest.mark.slow
def test_a_process_that_never_asks_is_named() -> None:
    """When one process has no sync point, the others' question ends with an error that names it."""
    outputs = run_case("never_asks", 3)
    for output in outputs[:2]:
        assert "missing (2,)" in output and "no answer from processes [2] of 3" in output, output


@pytest.mark.slow
def test_a_dead_announcer_is_taken_over() -> None:
    """A process that dies after announcing, before it sent any mail, does not hold the others up:
    they agree without it.
    """
    with CoordinationService.spawn(
        3, timeouts=ServiceTimeouts(heartbeat_s=8), recoverable=True, survivable=True
    ) as service:
        outputs = run_processes(
            PROGRAM,
            3,
            arguments=[service.address, "dead_announcer"],
            codes=[0, 0, -signal.SIGKILL],
        )
    assert_one_stop(outputs[:2])


@pytest.mark.slow
def test_without_coordinator_a_process_still_answers() -> None:
    """With the coordinator dead, questions are answered at once; a notice then is no reason to stop
    alone, and is logged.
    """
    with CoordinationService.spawn(
        2, timeouts=ServiceTimeouts(heartbeat_s=8), recoverable=True, survivable=True
    ) as service:
        with Processes(PROGRAM, 2, arguments=[service.address, "coordinator_dies"]) as processes:
            processes.wait_for(0, "begun")
            os.kill(service.pid, signal.SIGKILL)
            processes.kill(1)
            finished = processes.wait()
    assert finished[0].code == 0 and "answered" in finished[0].output, finished[0].output


def test_under_plain_jax_sigterm_reaches_both() -> None:
    """With jax.distributed alone and its service on, asking ours is enough: a SIGTERM stops all at
    one step, and JAX's own is notified.
    """
    with Processes(PROGRAM, 2, arguments=[f"127.0.0.1:{free_port()}", "plain_jax"]) as processes:
        for index in range(2):
            processes.wait_for(index, "ready")
        processes.kill(1, signal.SIGTERM)
        finished = processes.wait()
    assert [f.code for f in finished] == [0, 0], "\n".join(f.output for f in finished)
    assert_one_stop([f.output for f in finished])


def test_agree_on_step_spreads_the_primarys_decision() -> None:
    """Rank 0 proposes again and again; each proposal is reached once, at the same step in every
    process, ahead of all.
    """
    assert len(set(run_case("proposals", 3))) == 1


@pytest.mark.parametrize("notified", [0, 1])
def test_a_notice_while_some_leave(notified: int) -> None:
    """Process 0 waits in shutdown(), 1 and 2 still ask: a SIGTERM to one that waits, or asks, stops
    both at one step; nobody dies of it.
    """
    outputs = notify_while_leaving(notified, ("leaving", "asking", "asking"), shutdown_s=60)
    assert "left" in outputs[0]


def test_a_notice_after_some_have_left() -> None:
    """Process 0 did not wait for the others, and is gone: the agreement does not wait for it."""
    notify_while_leaving(1, ("left", "asking", "asking"), shutdown_s=0.1)


def notify_while_leaving(notified: int, marks: Sequence[str], shutdown_s: float) -> list[str]:
    """Sends SIGTERM once each process has printed its mark, and returns what all have printed:
    those that ask stop at one step.
    """
    arguments = [f"127.0.0.1:{free_port()}", "leaving", shutdown_s]
    with Processes(PROGRAM, 3, arguments=arguments) as processes:
        for index, text in enumerate(marks):
            processes.wait_for(index, text)
        processes.kill(notified, signal.SIGTERM)
        finished = processes.wait()
    outputs = [each.output for each in finished]
    assert [each.code for each in finished] == [0, 0, 0], "\n".join(outputs)
    assert_one_stop(outputs[1:])
    assert 10 < stopped_at(outputs[1])[0] < 200, outputs
    return outputs


def status_of(service: CoordinationService) -> list[Any]:
    with StatusClient(service.address) as client:
        return list(client.status().tasks)


def test_sigterm_before_all_have_joined_ends_it() -> None:
    """As it would have without us: nobody counts on it yet, and who launched it reads that as a
    preemption.
    """
    with CoordinationService.spawn(2, recoverable=True, survivable=True) as service:
        with Processes(PROGRAM, 1, arguments=[service.address, "joining"]) as processes:
            processes.wait_for(0, "waiting")
            while not any(task.has_session for task in status_of(service)):
                time.sleep(0.01)
            processes.kill(0, signal.SIGTERM)
            (finished,) = processes.wait()
    assert finished.code == -signal.SIGTERM, finished.output
