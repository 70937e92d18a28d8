"""Gathers what a diagnosis goes by: status, stacks where something is wrong, and a look at the
silent processes of this host.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from holdfast.proto import session_pb2

from ..client.status import StatusClient
from ..diagnosis.findings import Evidence, Look, silent, wants_stacks
from .local_look import look

_SAMPLES = 4
_SAMPLE_INTERVAL_S = 0.25
_ANSWER_S = 3.0  # for stacks: a process that cannot answer in this time has something to hide
_MOST_STACKS = 1024  # in all samples together: one is 10 to 50 KB
_MOST_LOOKS = 16  # each takes up to 6 s


def gather(client: StatusClient, *, with_stacks: bool = False, hangs: bool = False) -> Evidence:
    """Returns the evidence of a job now: with stacks where the status calls for them, or always.
    Blocks for at most a minute.

    `hangs` says that the job does not get on, whatever its steps say: what watchdogs have left then
    counts as stacks, too.

    Raises CoordinationError where the coordinator does not answer.
    """
    status = client.status()
    if not (with_stacks or hangs or wants_stacks(status)):
        return Evidence(status)
    processes = [task.task_id for task in status.tasks if task.has_session or hangs]
    samples = _sample(client, processes)
    samples = {
        task.task_id: samples[task.task_id]
        for task in status.tasks
        if task.has_session or samples.get(task.task_id)
    }
    unheard = [
        task for task in status.tasks if samples.get(task.task_id) == [] or silent(status, task)
    ]
    looks = _looks(unheard[:_MOST_LOOKS])
    seen = {process: [found.stacks] for process, found in looks.items() if found.stacks}
    return Evidence(client.status(), {**samples, **seen}, looks, hangs)


def _sample(client: StatusClient, processes: Sequence[int]) -> dict[int, list[str]]:
    """Returns the stacks of each process, several times; whoever does not answer the first time is
    not asked again.
    """
    samples: dict[int, list[str]] = {process: [] for process in processes}
    for number in range(max(1, min(_SAMPLES, _MOST_STACKS // max(1, len(processes))))):
        if number:
            time.sleep(_SAMPLE_INTERVAL_S)
        asked = [process for process in processes if len(samples[process]) == number]
        for process, answer in zip(asked, client.stacks(asked, timeout_s=_ANSWER_S), strict=True):
            if isinstance(answer, str):
                samples[process].append(answer)
    return samples


def _looks(tasks: Sequence[session_pb2.TaskStatus]) -> dict[int, Look]:
    host = socket.gethostname()
    looks = {
        task.task_id: look(task.task_id, task.pid)
        for task in tasks
        if task.host == host and task.pid
    }
    return {process: found for process, found in looks.items() if found is not None}
