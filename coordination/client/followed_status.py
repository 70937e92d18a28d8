"""A status that is kept up to date by what has changed: of thousands of processes, a few are heard
of between two looks.
"""

from __future__ import annotations

from holdfast.proto import session_pb2

from ..limits import RATE_WINDOW_S
from .status import StatusClient

WHOLE_EACH_S = 30.0
"""The coordinator's time between whole statuses: an increment leaves out that a call of a silent
process has ended.
"""


class FollowedStatus:
    """The status of a job, as it was at the last look. Not safe for several threads.

    `changed` are the processes that were heard of, or have changed, between the last two looks.
    """

    def __init__(self, client: StatusClient) -> None:
        self.changed: tuple[int, ...] = ()
        self._client = client
        self._last: session_pb2.StatusResponse | None = None
        self._whole_up_s = 0.0

    def look(self, *, events_after: int = 0) -> session_pb2.StatusResponse:
        """Returns the status now, a new object each time, with its events of a higher number."""
        last = self._last
        if last is not None and last.up_s - self._whole_up_s > WHOLE_EACH_S:
            last = None
        status = self._client.status(with_events=True, events_after=events_after, after=last)
        self.changed = tuple(task.task_id for task in status.tasks)
        if last is not None and status.partial:
            _complete(status, last)
        else:
            self._whole_up_s = status.up_s
        self._last = status
        return status


def _complete(status: session_pb2.StatusResponse, last: session_pb2.StatusResponse) -> None:
    """Makes a partial status whole, by an earlier one."""
    passed_s = status.up_s - last.up_s
    changed = {task.task_id: task for task in status.tasks}
    tasks = session_pb2.StatusResponse(tasks=last.tasks).tasks
    for task in tasks:
        if task.task_id in changed:
            task.CopyFrom(changed[task.task_id])
            continue
        if task.heartbeat_age_s >= 0:
            task.heartbeat_age_s += passed_s
        if task.step_age_s >= 0:
            task.step_age_s += passed_s
        if min(task.heartbeat_age_s, task.step_age_s) > RATE_WINDOW_S:
            task.ClearField("steps_per_second")
    del status.tasks[:]
    status.tasks.extend(tasks)
    status.ClearField("partial")
