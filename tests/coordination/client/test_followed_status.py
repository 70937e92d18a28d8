"""A status that is followed by increments."""

from __future__ import annotations

from typing import Any

from holdfast.coordination import CoordinationService, StatusClient
from holdfast.coordination.client import followed_status
from holdfast.coordination.client.followed_status import FollowedStatus
from holdfast.coordination.server.sessions import ResponseWriter
from holdfast.proto import session_pb2
from tests.support.crowd import Crowd

COUNT = 1_024


class Answer(ResponseWriter):
    """The answer to one unary call."""

    key = ""
    timed = True
    body = b""

    def names(self) -> tuple[bytes, ...]:
        return ()

    def succeed(self, body: bytes) -> None:
        self.body = body

    def fail(self, code: int, message: str, details: bytes) -> None:
        raise AssertionError(message)


class CrowdClient(StatusClient):
    """A status client of a crowd's service, on no sockets; it counts the bytes of its answers."""

    def __init__(self, crowd: Crowd) -> None:
        super().__init__("127.0.0.1:1")
        self.received_bytes = 0
        self.tasks = 0
        self._crowd = crowd

    def _call(
        self, path: str, request: Any, response: Any, timeout_s: float | None = None
    ) -> object:
        answer = Answer()
        self._crowd.service.unary(path, request.SerializeToString(), answer)
        self._crowd.service.flush()
        status = response.FromString(answer.body)
        self.received_bytes += len(answer.body)
        self.tasks += len(status.tasks)
        return status


def test_a_followed_status_is_the_whole_one() -> None:
    """Steps, a death, and time that passes: each look has what a whole status has, and the sum of
    all looks is little more than what has changed.
    """
    crowd = Crowd(COUNT, heartbeat_timeout_s=10_000.0)
    crowd.gather()
    crowd.tick(1.0)
    with CrowdClient(crowd) as client, CrowdClient(crowd) as plain:
        follower = FollowedStatus(client)
        follower.look()
        whole_bytes = client.received_bytes
        looks = 20
        for number in range(looks):
            crowd.tick(0.25)
            crowd.call(number, "Report", session_pb2.ReportRequest(step=number))
            if number == 8:
                crowd.machine.report_exit(900, -9, crowd.now)
                crowd.service.flush()
            status = follower.look()
            whole = plain.status(with_events=True)
            assert [round_ages(task) for task in status.tasks] == [
                round_ages(task) for task in whole.tasks
            ]
        assert client.tasks <= COUNT + 4 * looks
        assert client.received_bytes < whole_bytes + looks * 4_000
        crowd.tick(followed_status.WHOLE_EACH_S)
        before = client.tasks
        follower.look()
        follower.look()
        assert client.tasks - before >= COUNT


def test_a_process_that_is_silent_makes_no_steps() -> None:
    """A launcher's own status says so too, though no increment has told it: the process is stopped,
    or in C.
    """
    crowd = Crowd(2, heartbeat_timeout_s=10_000.0)
    crowd.gather()
    with CrowdClient(crowd) as client:
        follower = FollowedStatus(client)
        for step in range(9):
            crowd.call(0, "Report", session_pb2.ReportRequest(step=step))
            crowd.tick(0.25)
        assert follower.look().tasks[0].steps_per_second == 4
        for _ in range(44):  # at once it would be a pause of the service
            crowd.tick(0.25)
        assert follower.look().tasks[0].steps_per_second == 0
        assert follower.changed == ()


def round_ages(task: session_pb2.TaskStatus) -> session_pb2.TaskStatus:
    rounded = session_pb2.TaskStatus()
    rounded.CopyFrom(task)
    rounded.heartbeat_age_s = round(task.heartbeat_age_s, 6)
    rounded.step_age_s = round(task.step_age_s, 6)
    return rounded


def test_another_coordinator_at_the_address_is_asked_for_all() -> None:
    """Whatever was seen before, the tasks of a coordinator that was started again are its own."""
    with CoordinationService.spawn(3) as first, StatusClient(first.address) as client:
        earlier = client.status()
        assert client.status(after=earlier).partial
    with CoordinationService.spawn(2) as second, StatusClient(second.address) as client:
        status = client.status(after=earlier)
        assert not status.partial and len(status.tasks) == 2
