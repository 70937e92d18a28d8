"""A coordinator's status as tables for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.text import Text

from holdfast.coordination.diagnosis.findings import Finding, expected_s, silent
from holdfast.coordination.diagnosis.summary import (
    checkpoint_roots,
    counted,
    describe_goodput,
    describe_staying,
    printable,
    show_rate,
)
from holdfast.coordination.diagnosis.verdict import judge
from holdfast.coordination.process.diagnose import whom_to_ask
from holdfast.proto import coordination_pb2, session_pb2

from .common import shown_time
from .tables import Table

_COLOURS = {"CONNECTED": "green", "ERROR": "red", "DISCONNECTED": "yellow"}
_MAX_MISSING = 20
_MOST_ATTEMPTS = 5
_MAX_WRONG = 48  # rows of processes that are not as they should be
_TITLES = (
    "process",
    "state",
    "host",
    "pid",
    "last heard",
    "step",
    "steps/s",
    "saved",
    "blocked",
    "waiting",
    "waits",
    "memory",
    "peak",
    "error",
)
_TEXTS = ("state", "host", "error")
_FOLDS = (
    "pid",
    "error",
    "host",
    "peak",
    "memory",
    "waits",
    "blocked",
    "waiting",
    "saved",
    "last heard",
    "state",
    "steps/s",
    "step",
)


def status_tables(status: session_pb2.StatusResponse, findings: list[Finding]) -> Group:
    """Returns how the job is, what is wrong, a headline, and tables of processes, local steps and
    barriers.
    """
    verdict = judge(status, findings)
    parts: list[str | Text | Table] = [Text(verdict.state.value, style="bold")]
    parts += [Text(printable(finding.text, lines=True), style="bold red") for finding in findings]
    if not findings:
        parts.append(Text(printable(verdict.text, lines=True)))
    if verdict.advice:
        parts.append(Text(verdict.advice))
    parts.append(Text(printable(_headline(status)), style="bold"))
    if status.goodput_s:
        parts.append(describe_goodput(status.goodput_s))
    if len(status.launcher.attempts) > 1:
        parts += ["", _attempts(status.launcher.attempts[-_MOST_ATTEMPTS:])]
    shown = _shown(status)
    parts += ["", _processes(status, shown)]
    if len(shown) < len(status.tasks):
        parts.append(_others(status, shown))
    if local := [step for root in checkpoint_roots(status) for step in root.steps if step.local]:
        parts += ["", _local_steps(status, local)]
    if status.barriers:
        parts += ["", _barriers(status)]
    return Group(*parts)


def _headline(status: session_pb2.StatusResponse) -> str:
    job = f"job {status.job} attempt {status.attempt}, " if status.job else ""
    parts = [
        f"{job}{counted(status.num_processes, 'process')}, {status.phase}, up {status.up_s:.0f} s",
        f"{counted(status.keys, 'key')}, {status.key_bytes / 1024:.1f} KiB",
        f"{counted(status.barriers_passed, 'barrier')} passed, {status.barriers_failed} failed",
    ]
    if status.recoverable:
        parts.append("recoverable")
    if status.survivable:
        parts.append("survivable")
    if status.journal:
        parts.append(status.journal)
    return "; ".join(parts)


def _attempts(attempts: Sequence[session_pb2.Attempt]) -> Table:
    """Returns a row for each of the newest attempts: who stayed, and why it began."""
    titles = ("attempt", "began", "processes", "why")
    table = Table(titles, folds=("began", "why"), numbers=titles[:1])
    for attempt in attempts:
        began = shown_time(attempt.began_unix_s)
        table.add(str(attempt.number), began, describe_staying(attempt), attempt.why)
    return table


def _shown(status: session_pb2.StatusResponse) -> list[session_pb2.TaskStatus]:
    """Returns all processes of 64; of more, those that say most of the job."""
    chosen = set(whom_to_ask(status, status.tasks))
    if len(chosen) < len(status.tasks):
        wrong = [task.task_id for task in status.tasks if _is_wrong(task)]
        chosen.update(wrong[:_MAX_WRONG])
    return [task for task in status.tasks if task.task_id in chosen]


def _is_wrong(task: session_pb2.TaskStatus) -> bool:
    is_connected = task.state == coordination_pb2.CONNECTED
    return not is_connected or bool(task.error or task.progress.trouble)


def _others(status: session_pb2.StatusResponse, shown: Sequence[session_pb2.TaskStatus]) -> Text:
    """Returns how many processes have no row, by their states."""
    states = Counter(task.state for task in status.tasks)
    states.subtract(task.state for task in shown)
    counts = [
        f"{count:,} {coordination_pb2.TaskState.Name(state)}"
        for state, count in states.most_common()
        if count
    ]
    number = len(status.tasks) - len(shown)
    return Text(f"{number:,} more: {', '.join(counts)}; --json has them all")


def _processes(
    status: session_pb2.StatusResponse, shown: Sequence[session_pb2.TaskStatus]
) -> Table:
    numbers = [title for title in _TITLES if title not in _TEXTS]
    table = Table(_TITLES, _FOLDS, numbers)
    for task in shown:
        state = coordination_pb2.TaskState.Name(task.state)
        cells: list[str | Text] = [
            str(task.task_id),
            Text(state, style=_COLOURS.get(state, "")),
            task.host,
            str(task.pid or ""),
            _heard(status, task),
        ]
        error = " ".join((task.error or task.progress.trouble).split("\n"))
        table.add(*cells, *_progress(task), error)
    return table


def _progress(task: session_pb2.TaskStatus) -> list[str]:
    """Returns what a process reports of its work, "" for what it never did."""
    progress = task.progress
    values = progress.values
    return [
        str(progress.step) if progress.HasField("step") else "",
        show_rate(task.steps_per_second) if task.step_age_s >= 0 else "",
        str(progress.saved_step) if progress.HasField("saved_step") else "",
        f"{values['save_blocked_s']:.1f} s" if "save_blocked_s" in values else "",
        f"{values['waiting_share']:.0%}" if "waiting_share" in values else "",
        str(task.waiting_calls or ""),
        _gib(values, "memory_bytes"),
        _gib(values, "checkpoint_peak_bytes"),
    ]


def _gib(values: Mapping[str, float], name: str) -> str:
    return f"{values[name] / 2**30:.1f} GiB" if name in values else ""


def _heard(status: session_pb2.StatusResponse, task: session_pb2.TaskStatus) -> Text:
    if task.heartbeat_age_s < 0:
        return Text("never")
    heard = f"{task.heartbeat_age_s:.1f} of {expected_s(status, task):.0f} s"
    return Text(heard, style="red" if silent(status, task) else "")


def _local_steps(
    status: session_pb2.StatusResponse, steps: list[session_pb2.CheckpointStep]
) -> Table:
    """Returns the steps that the hosts have, and which processes have each process's part."""
    hosts = {task.task_id: task.host for task in status.tasks}
    titles = ("local step", "hosts that may be lost", "whose part is where")
    table = Table(titles, folds=titles[:0:-1], numbers=titles[:2])
    for step in steps:
        parts = []
        for process, copies in enumerate(step.copies[:_MAX_MISSING]):
            holders = [f"{holder} ({hosts.get(holder) or '?'})" for holder in copies.processes]
            parts.append(f"{process}: {', '.join(holders)}")
        if len(step.copies) > _MAX_MISSING:
            parts.append(f"and {len(step.copies) - _MAX_MISSING} more")
        table.add(str(step.step), str(step.survives), "; ".join(parts))
    return table


def _barriers(status: session_pb2.StatusResponse) -> Table:
    titles = ("barrier", "waiting (for)", "missing", "time left")
    table = Table(titles, folds=("waiting (for)", "time left", "missing"))
    for barrier in status.barriers:
        waiting = [
            f"{each.task_id} ({each.since_s:.1f} s)" for each in barrier.waiting[:_MAX_MISSING]
        ]
        missing = ", ".join(map(str, barrier.missing[:_MAX_MISSING]))
        if len(barrier.missing) > _MAX_MISSING:
            missing += f" and {len(barrier.missing) - _MAX_MISSING} more"
        table.add(
            barrier.barrier_id,
            ", ".join(waiting),
            Text(missing, style="red"),
            "" if barrier.left_s < 0 else f"{barrier.left_s:.1f} s",
        )
    return table
