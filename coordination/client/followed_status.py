"""A status that is kept up to date by what has changed: of thousands of processes, a few are heard
of between two looks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from holdfast.proto import session_pb2

from ..diagnosis.step_curve import StepCurve, sample
from ..limits import RATE_WINDOW_S
from .status import StatusClient

WHOLE_EACH_S = 30.0
"""The coordinator's time between whole statuses: an increment leaves out that a call of a silent
process has ended.
"""


_MOST_EVENTS = 1000


class FollowedStatus:
    """The status of a job, as it was at the last look. Not safe for several threads.

    `changed` are the processes that were heard of, or have changed, between the last two looks.
    `events` is the newest of the job's history. Each look is a sample of `curve`.
    """

    def __init__(self, client: StatusClient, curve: StepCurve | None = None) -> None:
        self.changed: tuple[int, ...] = ()
        self.events: deque[session_pb2.Event] = deque(maxlen=_MOST_EVENTS)
        self.curve = curve or StepCurve()
        self._client = client
        self._last: session_pb2.StatusResponse | None = None
        self._whole_up_s = 0.0

    def look(self) -> session_pb2.StatusResponse:
        """Returns the status now, a new object each time, with the events."""
        last = self._last
        if last is not None and last.up_s - self._whole_up_s > WHOLE_EACH_S:
            last = None
        known = self.events[-1].number if self.events else 0
        status = self._client.status(with_events=True, events_after=known, after=last)
        if self._last is not None and status.service_life != self._last.service_life:
            # Another coordinator is there: its events have numbers of their own.
            self.events.clear()
            status = self._client.status(with_events=True)
        self.changed = tuple(task.task_id for task in status.tasks)
        if last is not None and status.partial:
            _complete(status, last)
        else:
            self._whole_up_s = status.up_s
        self._last = status
        add_events(self.events, status.events)
        del status.events[:]
        status.events.extend(self.events)
        self.curve.add(sample(status, time.time()))
        return status


def add_events(known: deque[session_pb2.Event], new: Iterable[session_pb2.Event]) -> None:
    """Adds what is new. The coordinator makes one event of all that join within a second, and this
    launcher may know it with fewer: then the new one counts those too.
    """
    for event in new:
        before = known[-1] if known else None
        if (
            before is not None
            and event.kind in ("joined", "left")
            and event.kind == before.kind
            and event.unix_s - before.unix_s < 1.0
        ):
            known.pop()
        known.append(event)


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
