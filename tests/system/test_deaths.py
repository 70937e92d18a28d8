"""A death is known at once where somebody saw it, and in seconds where nobody did: each wait that
needs the process ends by its name.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.coordination import (
    CoordinationClient,
    CoordinationService,
    Endpoint,
    ServiceTimeouts,
    StatusClient,
)
from holdfast.proto import coordination_pb2
from tests.support.cluster import Processes
from tests.support.paths import program
from tests.support.proxy import Proxy

HEARTBEAT_S = 100.0
"""Far above all that is waited for here: no silence decides anything."""
HOLDFAST = Path(sys.executable).parent / "holdfast"

WAITING = program("deaths_waiting")


@contextmanager
def job(count: int, *arguments: str, grace_s: float = 1.0) -> Iterator[tuple[Processes, int]]:
    """Yields processes that wait for the last of them, and its number."""
    options: dict[str, Any] = {
        "recoverable": True,
        "survivable": True,
        "timeouts": ServiceTimeouts(heartbeat_s=HEARTBEAT_S),
    }
    with CoordinationService.spawn(
        count, **options, arguments=(f"--reconnect-grace-s={grace_s}",)
    ) as service:
        ranks = [
            {"OMPI_COMM_WORLD_RANK": str(index), "OMPI_COMM_WORLD_SIZE": str(count)}
            for index in range(count)
        ]
        with Processes(
            WAITING, count, arguments=[service.address, *arguments], env_of=ranks.__getitem__
        ) as processes:
            processes.wait_for(count - 1, "pid ")
            for index in range(count - 1):
                processes.wait_for(index, "waits")
            with StatusClient(service.address) as status:
                while not all(
                    task.waiting_calls for task in status.status().tasks
                ):  # whose connections then end with a call under way
                    time.sleep(0.02)
            yield processes, int(processes.output(count - 1).split("pid ")[1].split()[0])


def failures(processes: Processes, count: int) -> list[tuple[float, str, str]]:
    """Returns when and how the waits of the first `count` processes failed."""
    found = []
    for index in range(count):
        processes.wait_for(index, "failed")
        found.append(
            tuple(json.loads(processes.output(index).split("failed ", 1)[1].splitlines()[0]))
        )
    return found


@pytest.mark.parametrize("whose", ["ours", pytest.param("jaxlib's", marks=pytest.mark.slow)])
def test_a_launchers_word_ends_every_wait(whose: str) -> None:
    """SIGKILL of one of three under `holdfast task`: a barrier and a blocking get fail with its
    name and why, a hundredth of the heartbeat timeout later, with our client and with jaxlib's own.
    """
    with job(3, "task", whose) as (processes, pid):
        killed_at = time.time()
        os.kill(pid, signal.SIGKILL)
        found = failures(processes, 2)
        assert processes.popens[2].wait(20) == 128 + signal.SIGKILL
    for failed_at, kind, message in found:
        print(f"{whose}: {failed_at - killed_at:.2f} s after SIGKILL: {kind}: {message}")
        assert "ended by signal 9" in message and "process 2" in message
        assert kind == ("ProcessLost" if whose == "ours" else "JaxRuntimeError")
        assert failed_at - killed_at < HEARTBEAT_S / 10


@pytest.mark.parametrize("whose", ["ours", "jaxlib's"])
def test_an_unseen_death_is_known_after_the_grace(whose: str) -> None:
    """SIGKILL of one of three that nobody started for us: its kernel closes its connection, and 1 s
    later it is lost; jaxlib's agent too, which had a call under way. A blocking get of jaxlib's
    names nobody, and waits on.
    """
    with job(3, "", whose) as (processes, pid):
        killed_at = time.time()
        os.kill(pid, signal.SIGKILL)
        found = failures(processes, 2 if whose == "ours" else 1)
    for failed_at, kind, message in found:
        print(f"{whose}: {failed_at - killed_at:.2f} s after SIGKILL: {kind}: {message}")
        assert "process 2 (" in message
        assert failed_at - killed_at < HEARTBEAT_S / 5


@pytest.mark.slow
@pytest.mark.timeout(1200)  # twenty jobs, of which each waits for the grace
@pytest.mark.parametrize("starter", ["task", ""])
@pytest.mark.parametrize("whose", ["ours", "jaxlib's"])
def test_twenty_deaths_of_twenty(whose: str, starter: str) -> None:
    """SIGKILL of one of four, with and without a launcher, at the default grace: each survivor's
    wait ends by its name, each time.
    """
    waited: list[float] = []
    for _ in range(20):
        with job(4, starter, whose, grace_s=5.0) as (processes, pid):
            killed_at = time.time()
            os.kill(pid, signal.SIGKILL)
            found = failures(processes, 3 if starter or whose == "ours" else 1)
        assert all("process 3 (" in message for _, _, message in found), found
        waited += [failed_at - killed_at for failed_at, _, _ in found]
    print(
        f"{whose}, started by {starter or 'nobody'}: {min(waited):.2f} to {max(waited):.2f} s after"
        " SIGKILL"
    )
    assert max(waited) < HEARTBEAT_S / 5


PATIENT = program("deaths_patient")


@pytest.mark.parametrize("stop_s", [6.0, pytest.param(30.0, marks=pytest.mark.slow)])
def test_who_is_alive_is_not_lost(stop_s: float) -> None:
    """A process that is paused for far longer than the grace, and one whose connection was reset:
    nobody is lost, and all meet.
    """
    grace_s = min(
        5.0, stop_s / 3
    )  # a living client comes back at once, but on a loaded machine that takes a while
    with CoordinationService.spawn(
        3,
        timeouts=ServiceTimeouts(heartbeat_s=HEARTBEAT_S),
        recoverable=True,
        arguments=(f"--reconnect-grace-s={grace_s}",),
    ) as service:
        with (
            Proxy(service.address) as proxy,
            Processes(PATIENT, 2, arguments=[service.address, proxy.address]) as processes,
        ):
            with CoordinationClient(service.address, 2) as last:  # for whom the others wait
                processes.kill(0, signal.SIGSTOP)
                proxy.cut()
                time.sleep(stop_s)  # what is tested is that so much time passes
                with StatusClient(service.address) as status:
                    assert [(task.state, task.error) for task in status.status().tasks] == [
                        (coordination_pb2.CONNECTED, "")
                    ] * 3
                processes.kill(0, signal.SIGCONT)
                last.wait_at_barrier("meet", 60_000)
            assert [each.code for each in processes.wait(60)] == [0, 0], processes.output(1)


def test_a_coordinator_from_its_journal_suspects_nobody(tmp_path: Path) -> None:
    """Killed and restarted on its port: each comes back on a new stream, later than the grace, and
    all meet.
    """
    options: dict[str, Any] = {
        "recoverable": True,
        "timeouts": ServiceTimeouts(heartbeat_s=HEARTBEAT_S),
        "journal": str(tmp_path / "journal"),
    }
    arguments = ("--reconnect-grace-s=0.2",)
    with CoordinationService.spawn(2, **options, arguments=arguments) as first:
        with (
            Processes(PATIENT, 1, arguments=[first.address, ""]) as processes,
            CoordinationClient(first.address, 1) as last,
        ):
            os.kill(first.pid, signal.SIGKILL)
            first.wait(10)
            port = int(first.address.rsplit(":", 1)[1])
            with CoordinationService.spawn(
                2, endpoint=Endpoint(port=port), **options, arguments=arguments
            ) as second:
                last.wait_at_barrier("meet", 60_000)
                last.shutdown()
                assert [each.code for each in processes.wait(60)] == [0], processes.output(0)
                assert second.wait(30) == 0
