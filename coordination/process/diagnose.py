"""Gathers what a diagnosis goes by: status, stacks where something is wrong, and a look at the
silent processes of this host.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Sequence

from holdfast.proto import session_pb2

from ..client.status import StatusClient
from ..diagnosis.findings import Evidence, Look, silent, wants_stacks
from ..diagnosis.stacks import parse
from .local_look import look

_SAMPLES = 4
_SAMPLE_INTERVAL_S = 0.25
_ANSWER_S = 3.0  # for stacks: a process that cannot answer in this time has something to hide
_MOST_ODD = 48  # processes whose stacks are asked for: each answer has 10 to 50 KB
_MOST_ORDINARY = 16  # others, to compare them with
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
    asked = [task for task in status.tasks if task.has_session or hangs]
    samples = _sample(client, whom_to_ask(status, asked))
    samples = {
        task.task_id: samples[task.task_id]
        for task in status.tasks
        if samples.get(task.task_id) or (task.has_session and task.task_id in samples)
    }
    unheard = [
        task for task in status.tasks if samples.get(task.task_id) == [] or silent(status, task)
    ]
    looks = _looks(unheard[:_MOST_LOOKS])
    seen = {process: [found.stacks] for process, found in looks.items() if found.stacks}
    now = client.status()
    if now.service_life != status.service_life:
        return Evidence(now, hangs=hangs)  # who did not answer had lost the former coordinator
    return Evidence(now, {**samples, **seen}, looks, hangs)


def place_of(process_id: int, pid: int) -> str:
    """Returns where a process of this host is in its own code, such as "step, train.py:12".

    "" where that cannot be seen. Blocks for at most 6 s.
    """
    seen = look(process_id, pid)
    threads = () if seen is None else parse(seen.stacks)
    place = threads[0].place if threads else None
    return "" if place is None else place.place


def whom_to_ask(
    status: session_pb2.StatusResponse, tasks: Sequence[session_pb2.TaskStatus]
) -> list[int]:
    """Returns the processes whose stacks say most: all of 64; of more, those that are missed at
    barriers, behind in steps or silent for longest, and some of the others, spread over all.
    """
    if len(tasks) <= _MOST_ODD + _MOST_ORDINARY:
        return [task.task_id for task in tasks]
    missed = Counter(task_id for barrier in status.barriers for task_id in barrier.missing)
    ages = sorted(tasks, key=lambda task: -task.heartbeat_age_s)
    # Sorts keep the order of what is equal: of those that are alike otherwise, the silent first.
    odd = sorted(ages, key=lambda task: (-missed[task.task_id], task.progress.step))
    chosen = {task.task_id for task in odd[:_MOST_ODD]}
    others = [task.task_id for task in tasks if task.task_id not in chosen]
    chosen.update(others[:: len(others) // _MOST_ORDINARY][:_MOST_ORDINARY])
    return sorted(chosen)


def _sample(client: StatusClient, processes: Sequence[int]) -> dict[int, list[str]]:
    """Returns the stacks of each process, several times; whoever does not answer the first time is
    not asked again.
    """
    samples: dict[int, list[str]] = {process: [] for process in processes}
    for number in range(_SAMPLES):
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
