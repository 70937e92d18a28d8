"""The start of jax in bounded time.

jax waits in C++ for processes that have joined, and may have died since.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.coordination import CoordinationError, Credentials, ProcessLost, StatusClient

from ..errors import StartupTimeout
from ..group.group_client import Deadline, GroupClient, named
from ..spec import ProcessSpec
from ..threads import on_thread
from .jax_agent import end_jax

_STATUS_TIMEOUT_S = 2.0


@contextmanager
def ended_by_loss(
    group_client: GroupClient, spec: ProcessSpec, credentials: Credentials, deadline: Deadline
) -> Iterator[None]:
    """Runs the start of jax; ends its waits in C++ when a process is lost or the time is over.

    Raises ProcessLost with the name of a process that has died since it joined, else StartupTimeout
    with those that jax waits for. What has failed for another reason raises as it did.
    """
    over = threading.Event()  # the time, or the wait for it
    finished = threading.Event()
    ending = threading.Lock()

    def end_waits() -> Exception | None:
        over.wait(deadline.remaining_s())
        with ending:
            if finished.is_set():
                return None
            culprit = _culprit(group_client, spec, credentials, deadline)
            end_jax()
            return culprit

    def check() -> None:
        if group_client.lost_tasks():
            over.set()

    ended = on_thread("start", end_waits)
    failure: Exception | None = None
    try:
        with group_client.peers.on_change(check):
            check()
            yield
    except Exception as error:
        failure = error
    finally:
        with ending:
            finished.set()
        over.set()
    # Whatever jax made of its end.
    if (culprit := ended.result()) is not None:
        raise culprit from failure
    if failure is not None:
        raise failure


def _culprit(
    group_client: GroupClient, spec: ProcessSpec, credentials: Credentials, deadline: Deadline
) -> Exception:
    """Returns who is to blame: one that died without a word, one that is lost, or the late ones."""
    try:
        with StatusClient(spec.coordinator, credentials, timeout_s=_STATUS_TIMEOUT_S) as client:
            tasks = client.status().tasks
    except CoordinationError as error:
        return error
    for task in tasks:
        # It had a session, lost it, and the heartbeat timeout is not over: nobody says yet that
        # the process is dead, but jax waits for it.
        if task.pid and not task.has_session and not task.error:
            return ProcessLost(
                f"process {task.task_id} (host {task.host or 'unknown'}, silent for"
                f" {task.heartbeat_age_s:.0f} s) joined the job and is gone before jax had"
                f" started, for which initialize() waited {deadline.elapsed_s():.0f} s",
                process=task.task_id,
                host=task.host or None,
                silent_s=task.heartbeat_age_s,
            )
    try:
        group_client.raise_if_lost(range(spec.num_processes), "the start of jax")
    except ProcessLost as error:
        return error
    late = tuple(task.task_id for task in tasks if not task.has_agent)
    whom = named(late) if late else "one whose backend does not come up"
    return StartupTimeout(
        f"jax did not start in {deadline.timeout_s:g} s: all have joined the job, and it waits for"
        f" {whom}",
        attempt=spec.attempt,
        processes=late,
        elapsed_s=deadline.elapsed_s(),
        timeout_s=deadline.timeout_s,
        knob="timeout_s",
    )
