"""Real faults on real processes: every other peer has a named error in time, nobody hangs, nobody
aborts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from holdfast.coordination import (
    CoordinationClient,
    CoordinationService,
    Endpoint,
    ProcessInfo,
    ServiceTimeouts,
)
from tests.support.cluster import Processes
from tests.support.network import Network, namespaces, python_in
from tests.support.paths import program

HEARTBEAT_S = 3
SETTLE_S = 2.0

PEER = program("faults_peer")


def ends(processes: Processes, index: int, timeout_s: float = 60) -> tuple[float, str, str]:
    """Waits for a peer's error and returns (monotonic time, its type, whom it names)."""
    processes.wait_for(index, "ended", timeout_s)
    line = next(line for line in processes.output(index).splitlines() if line.startswith("ended"))
    _, when, kind, who = line.split()
    return float(when), kind, who


# --- Network namespaces


@pytest.fixture
def network() -> Iterator[Network]:
    with namespaces(3) as network:
        yield network


@pytest.mark.parametrize(
    "fault",
    [
        "SIGKILL",
        *(
            pytest.param(fault, marks=pytest.mark.slow)
            for fault in ("SIGSTOP", "link down", "packet drop")
        ),
    ],
)
def test_every_other_peer_names_it_in_time(fault: str, network: Network, tmp_path: Path) -> None:
    """One of three peers in namespaces of their own goes silent: the others name it within the
    heartbeat timeout + 2 s.
    """
    with CoordinationService.spawn(
        3,
        endpoint=Endpoint(host=network.host),
        timeouts=ServiceTimeouts(heartbeat_s=HEARTBEAT_S),
        recoverable=True,
    ) as service:
        groups = [
            Processes(
                PEER,
                1,
                arguments=[service.address, index, 3, HEARTBEAT_S],
                python=python_in(name, tmp_path),
            )
            for index, name in enumerate(network.names)
        ]
        try:
            for group in groups:
                group.wait_for(0, "started")
            victim = groups[2]
            others = groups[:2]
            begun = time.monotonic()
            if fault.startswith("SIG"):
                victim.kill(0, getattr(signal, fault))
            elif fault == "link down":
                network.unplug(2)
            else:
                network.drop(2)
            for group in others:
                when, kind, who = ends(group, 0)
                assert (kind, who) == ("ProcessLost", "2")
                assert when - begun <= HEARTBEAT_S + SETTLE_S
            if not fault.startswith("SIG"):
                when, kind, who = ends(victim, 0)
                assert (kind, who) == ("CoordinatorLost", service.address)
                assert when - begun <= HEARTBEAT_S + SETTLE_S
            codes = [
                group.wait(30)[0].code
                for group in groups
                if group is not victim or not fault.startswith("SIG")
            ]
            assert set(codes) == {0}
        finally:
            for group in groups:
                group.__exit__(None, None, None)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cut_below_the_timeout_loses_nobody(tmp_path: Path) -> None:
    """Twenty hosts without a network for less than their heartbeat timeout, with bytes under way in
    both directions, are silent. Their processes are not lost, and pass the next barrier.
    """
    hosts = 20
    with (
        namespaces(hosts) as network,
        CoordinationService.spawn(
            hosts + 1,
            endpoint=Endpoint(host=network.host),
            timeouts=ServiceTimeouts(heartbeat_s=100),
            recoverable=True,
        ) as service,
        contextlib.ExitStack() as stack,
    ):
        survivors = [
            stack.enter_context(
                Processes(
                    program("faults_survivor"),
                    1,
                    arguments=[service.address, index + 1, hosts + 1],
                    python=python_in(name, tmp_path),
                )
            )
            for index, name in enumerate(network.names)
        ]
        near = stack.enter_context(CoordinationClient(service.address, 0))
        for survivor in survivors:
            survivor.wait_for(0, "started")
        for index in range(hosts):
            network.unplug(index)
        near.key_value_set("news", "x" * 100_000)  # which the others wait for
        time.sleep(40)  # nothing happens meanwhile: that is what is tested
        for index in range(hosts):
            network.plug(index)
        near.wait_at_barrier("after", 100_000)
        assert [survivor.wait(30)[0].code for survivor in survivors] == [0] * hosts


# --- The coordinator dies and comes back

STEPPER = program("faults_stepper")


@pytest.mark.slow
def test_a_restarted_coordinator_loses_and_doubles_no_barrier(tmp_path: Path) -> None:
    """Three SIGKILLs in 200 steps: the job finishes, and behind each step's barrier every process's
    key of that step is there.
    """
    arguments = (f"--journal={tmp_path / 'journal'}",)
    options = {
        "timeouts": ServiceTimeouts(heartbeat_s=30),
        "recoverable": True,
        "survivable": True,
        "arguments": arguments,
    }
    service = CoordinationService.spawn(3, **options)  # type: ignore[arg-type]
    port = int(service.address.rsplit(":", 1)[1])
    try:
        with Processes(STEPPER, 3, arguments=[service.address]) as processes:
            for step in (30, 80, 130):
                processes.wait_for(step % 3, f"step {step}")
                os.kill(service.pid, signal.SIGKILL)
                service.close()
                service = CoordinationService.spawn(3, endpoint=Endpoint(port=port), **options)  # type: ignore[arg-type]
            finished = processes.wait(90)
            assert [each.code for each in finished] == [0, 0, 0], [
                each.output[-1500:] for each in finished
            ]
            assert all("breaks 0" not in each.output for each in finished)
    finally:
        service.close()


RETURNER = program("faults_returner")


@pytest.mark.parametrize("recoverable", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_process_that_was_given_up_is_fenced(recoverable: bool) -> None:
    """Stopped beyond its heartbeat timeout and continued: this life of it is over, and it learns
    so, whether or not another may come.
    """
    lost = threading.Event()

    def listen(processes: Sequence[ProcessInfo]) -> None:
        if processes[0].state == "ERROR":
            lost.set()

    with CoordinationService.spawn(
        2, timeouts=ServiceTimeouts(heartbeat_s=3), recoverable=recoverable
    ) as service:
        with Processes(RETURNER, 1, arguments=[service.address]) as processes:
            onlooker = CoordinationClient(service.address, 1)
            onlooker.watch_processes(listen)
            with contextlib.closing(onlooker):
                onlooker.connect()
                processes.wait_for(0, "up")
                processes.kill(0, signal.SIGSTOP)
                assert lost.wait(15)
                processes.kill(0, signal.SIGCONT)
                processes.wait_for(0, "told Fenced ABORTED", 30)
                assert processes.wait(20)[0].code == 0
