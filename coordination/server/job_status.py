"""The status of a job as `holdfast status` shows it: tasks, barriers with the waiting and the
missing, keys. Pure.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

from holdfast.proto import session_pb2

from ..core.barriers import Barrier
from ..core.machine import Machine
from ..core.task_table import Task, TaskState
from ..limits import HEARTBEATS_PER_TIMEOUT

_MAX_PREFIXES = 50
# where the watchdog of holdfast.multihost leaves the stacks that it found, as JSON
_STACKS_PREFIX = "holdfast/stacks/"


def status_of(
    machine: Machine, now: float, since: float = -math.inf, **beside: Any
) -> session_pb2.StatusResponse:
    """Returns the state of the whole job at `now`; of its tasks those of which something has come,
    or that have changed, since a time. What the machine does not know stands `beside`.
    """
    config = machine.config
    waiting_calls = machine.waiting_calls()
    tasks = [
        _task(task, now, waiting_calls[task.task_id])
        for task in machine.task_table.tasks
        if _changed_at(task) >= since
    ]
    status = session_pb2.StatusResponse(
        job=config.job,
        attempt=config.attempt,
        num_processes=config.num_tasks,
        up_s=now - machine.started,
        phase=_phase(machine),
        tasks=tasks,
        barriers=[_barrier(barrier, now) for barrier in machine.barriers.open.values()],
        keys=len(machine.keys.values),
        key_bytes=machine.keys.total_bytes,
        prefixes=_prefixes(machine.keys.values),
        barriers_passed=machine.barriers.passed,
        barriers_failed=machine.barriers.failed,
        recoverable=config.recoverable,
        survivable=config.survivable,
        heartbeat_interval_s=config.heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT,
        partial=since > -math.inf,
        **beside,
    )
    if leaving := machine.shutdown_barrier:
        missing = sorted(machine.task_table.everyone - leaving.keys())
        waiting = [
            session_pb2.Waiting(task_id=task_id, since_s=now - call.came)
            for task_id, call in leaving.items()
        ]
        status.barriers.add(barrier_id="shutdown", waiting=waiting, missing=missing, left_s=-1)
    return status


def _changed_at(task: Task) -> float:
    never = -math.inf
    heard = never if task.last_seen is None else task.last_seen
    suspect = never if task.suspect_since is None else task.suspect_since
    return max(heard, suspect, task.state_since)


def events_of(machine: Machine, after: int, wall_offset_s: float) -> list[session_pb2.Event]:
    """Returns the events of a higher number than `after`; wall time is the machine's time plus
    `wall_offset_s`.
    """
    return [
        session_pb2.Event(
            number=event.number,
            unix_s=event.at + wall_offset_s,
            kind=event.kind,
            text=event.text,
            task_id=event.task_id,
        )
        for event in machine.events.after(after)
    ]


def left_stacks(machine: Machine, task_id: int) -> bytes:
    """Returns the stacks that the watchdog of a process has left in a key, b"" where it has not."""
    try:
        record = json.loads(machine.keys.values.get(f"{_STACKS_PREFIX}{task_id}", b""))
        text = f"Left by its watchdog: {record['why']}\n{record['stacks']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return b""
    return text.encode(errors="replace")


def _phase(machine: Machine) -> str:
    if not machine.registration.gathered:
        return "gathering"
    if machine.shutdown_barrier or machine.task_table.lost:
        return "ending"
    return "running"


def _task(task: Task, now: float, waiting_calls: int) -> session_pb2.TaskStatus:
    return session_pb2.TaskStatus(
        task_id=task.task_id,
        state=int(task.state),  # type: ignore[arg-type]
        host=task.host,
        pid=task.pid,
        heartbeat_age_s=-1.0 if task.last_seen is None else now - task.last_seen,
        error=task.error.message if task.error else "",
        has_session=task.attached,
        has_agent=task.agent != 0,
        progress=task.progress,
        step_age_s=-1.0 if task.steps.moved_at is None else now - task.steps.moved_at,
        # Who is gone makes no steps, however fast it was.
        steps_per_second=task.steps.per_second(now) if task.state is TaskState.CONNECTED else 0.0,
        usual_steps_per_second=task.steps.usual_per_second(now),
        waiting_calls=waiting_calls,
    )


def _barrier(barrier: Barrier, now: float) -> session_pb2.BarrierStatus:
    return session_pb2.BarrierStatus(
        barrier_id=barrier.name,
        counter=barrier.counter,
        waiting=[
            session_pb2.Waiting(task_id=task_id, since_s=now - came)
            for task_id, (_, came) in barrier.arrived.items()
        ],
        missing=sorted(barrier.missing()),
        left_s=max(0.0, barrier.deadline - now) if barrier.deadline != float("inf") else -1.0,
    )


def _prefixes(values: dict[str, bytes]) -> list[session_pb2.KeyPrefix]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for key, value in values.items():
        prefix = key.split("/", 1)[0]
        counts[prefix] += 1
        sizes[prefix] += len(value)
    return [
        session_pb2.KeyPrefix(prefix=name, keys=count, bytes=sizes[name])
        for name, count in counts.most_common(_MAX_PREFIXES)
    ]
