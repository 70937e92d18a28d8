"""Who is lost and who is not, on real processes: a coordinator that stood still, a jaxlib client
that was given up and comes back.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.coordination import CoordinationService, Credentials, Relay, ServiceTimeouts
from holdfast.coordination.client.status import StatusClient
from holdfast.proto import coordination_pb2, session_pb2
from tests.support.cluster import Processes
from tests.support.paths import program
from tests.support.raw_session import RawSession

HEARTBEAT_S = 1.0


class BeatingSession:
    """A Session on a connection of its own, with a heartbeat four times in the timeout and no
    patience to lose.
    """

    def __init__(self, address: str, process_id: int) -> None:
        self._session = RawSession(address, timeout_s=60).open(process_id, 50 + process_id)
        self._sending = threading.Lock()
        self.replies: queue.SimpleQueue[session_pb2.Reply] = queue.SimpleQueue()
        self.end: str | None = None
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in (self._read, self._beat)
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, number: int, method: str, message: object) -> None:
        with self._sending:
            self._session.ask(number, method, message)

    def answer(self, number: int, timeout_s: float = 20) -> session_pb2.Reply:
        """Returns the reply to a request; heartbeats' are passed over."""
        while (reply := self.replies.get(timeout=timeout_s)).id != number:
            pass
        return reply

    def _read(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while not (frame := self._session.read()).HasField("end"):
                if frame.HasField("reply"):
                    self.replies.put(frame.reply)
            self.end = frame.end.message
        self.end = self.end or "ended"

    def _beat(self) -> None:
        with contextlib.suppress(OSError):
            while not self._stop.wait(HEARTBEAT_S / 4):
                self.ask(1, "Heartbeat", coordination_pb2.HeartbeatRequest())

    def close(self) -> None:
        self._stop.set()
        self._session.connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(20)
        self._session.close()


@pytest.fixture
def service() -> Iterator[CoordinationService]:
    with CoordinationService.spawn(
        3,
        timeouts=ServiceTimeouts(heartbeat_s=HEARTBEAT_S),
        recoverable=True,
    ) as service:
        yield service


def test_a_coordinator_that_was_stopped_loses_nobody(
    service: CoordinationService,
) -> None:
    """It reads what has arrived before it lets time pass: all three live on, and a barrier whose
    last came meanwhile is passed.
    """
    sessions = [BeatingSession(service.address, process_id) for process_id in range(3)]
    try:
        for session in sessions:
            session.ask(2, "RegisterTask", coordination_pb2.RegisterTaskRequest())
        assert [session.answer(2).code for session in sessions] == [0, 0, 0]
        arrive = coordination_pb2.BarrierRequest(barrier_id="b", barrier_timeout_in_ms=1500)
        for session in sessions[:2]:
            session.ask(3, "Barrier", arrive)
            session.ask(4, "TryGetKeyValue", coordination_pb2.TryGetKeyValueRequest(key="k"))
        assert [session.answer(4).code for session in sessions[:2]] == [
            5,
            5,
        ]  # so the two have arrived
        os.kill(service.pid, signal.SIGSTOP)
        sessions[2].ask(3, "Barrier", arrive)
        time.sleep(2 * HEARTBEAT_S + 0.5)  # what is tested is that so much time passes
        os.kill(service.pid, signal.SIGCONT)
        assert [session.answer(3).code for session in sessions] == [0, 0, 0]
        everyone = coordination_pb2.GetAliveTasksRequest(task_ids=range(3))
        for number, session in enumerate(sessions):
            everyone.requesting_task_id = number
            session.ask(5, "GetAliveTasks", everyone)
        answers = [
            session_pb2.LivingTasks.FromString(session.answer(5).body).packed
            for session in sessions
        ]
        alive = [
            [task for task, life in enumerate(session_pb2.Lives.FromString(lives).lives) if life]
            for lives in map(zlib.decompress, answers)
        ]
        assert alive == [[0, 1, 2]] * 3 and [session.end for session in sessions] == [None] * 3
    finally:
        for session in sessions:
            session.close()


CLIENT = program("leases_client")


@pytest.mark.parametrize(
    "relayed",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["straight", "relay"],
)
def test_our_clients_outwait_a_coordinator_that_is_stopped(
    service: CoordinationService, relayed: bool, tmp_path: Path
) -> None:
    """For twice the timeout it answers nobody, but connections to it are accepted: nobody gives it
    up, and all meet when it goes on.
    """
    with contextlib.ExitStack() as stack:
        relay = (
            stack.enter_context(Relay.spawn(service.address, Credentials(), range(3)))
            if relayed
            else service
        )
        processes = stack.enter_context(
            Processes(CLIENT, 3, arguments=[relay.address, tmp_path / "go"])
        )
        for index in range(3):
            processes.wait_for(index, "connected")
        os.kill(service.pid, signal.SIGSTOP)
        time.sleep(2 * HEARTBEAT_S + 0.5)  # what is tested is that so much time passes
        os.kill(service.pid, signal.SIGCONT)
        (tmp_path / "go").touch()
        ended = processes.wait()
    assert [(each.code, each.output.splitlines()[-1]) for each in ended] == [(0, "met")] * 3, ended


JAXLIB_CLIENT = program("leases_jaxlib_client")


def wait_until_lost(address: str, process_id: int, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    with StatusClient(address) as client:
        while client.status().tasks[process_id].state != coordination_pb2.TaskState.ERROR:
            assert time.monotonic() < deadline, client.status()
            time.sleep(0.05)


def test_a_jaxlib_client_given_up_is_refused() -> None:
    """Stopped for longer than the timeout and continued: its keys are ABORTED with the reason, and
    its shutdown ends without SIGABRT.

    Its own heartbeat is out of the way: jaxlib's client aborts at the first that is answered with
    an error, whatever the error.
    """
    with (
        CoordinationService.spawn(
            2, timeouts=ServiceTimeouts(heartbeat_s=2), recoverable=True, survivable=True
        ) as service,
        Processes(JAXLIB_CLIENT, 2, arguments=[service.address]) as processes,
    ):
        for index in range(2):
            processes.wait_for(index, "connected")
        processes.kill(1, signal.SIGSTOP)
        wait_until_lost(service.address, 1)
        processes.kill(1, signal.SIGCONT)
        processes.wait_for(1, "ended")
        assert "refused ABORTED: this life of process 1 is over" in processes.output(1)
        processes.kill(0)
        assert [each.code for each in processes.wait()] == [-signal.SIGKILL, 0]
