"""How a job is, in one word and one sentence. Pure: from its status and what is wrong with it.

`holdfast status`, the page, the report and `--json` all show this verdict. What the launcher says
of the job comes first. Then comes what the coordinator sees:

    over               Finished, Preempted, Failed
    a notice           Preempting
    between attempts   Waiting for machines, Restarting
    no process's step  Starting, or Failed where a process has failed
    steps              Hung, Slow, In trouble, Healthy
    no coordinator     Out of reach, unless the launcher's word explains it
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from holdfast.proto import coordination_pb2, session_pb2

from .findings import Finding, stalled_s
from .summary import counted, fastest, show_rate, usually_fastest

HUNG_S = 60.0
"""Without a step for so long a job is hung, though no process stands out."""
_SLOW_SHARE = 0.5  # of the usual pace


class JobState(enum.StrEnum):
    """How a job is: the first words of every view of it."""

    HEALTHY = "Healthy"
    STARTING = "Starting"
    WAITING = "Waiting for machines"
    SLOW = "Slow"
    TROUBLE = "In trouble"
    HUNG = "Hung"
    PREEMPTING = "Preempting"
    RESTARTING = "Restarting"
    FAILED = "Failed"
    PREEMPTED = "Preempted"
    FINISHED = "Finished"
    UNREACHABLE = "Out of reach"


OVER = frozenset({JobState.FAILED, JobState.PREEMPTED, JobState.FINISHED})
"""The states after which nothing happens to a job any more."""


@dataclass(frozen=True)
class Verdict:
    """How a job is. `text` says why, in one sentence; `advice` what to do, "" where nothing is."""

    state: JobState
    text: str
    advice: str = ""

    def as_json(self) -> dict[str, str]:
        """Returns the fields as JSON holds them."""
        return {"state": self.state.value, "text": self.text, "advice": self.advice}


BY_LAUNCHER: Mapping[str, JobState] = MappingProxyType(
    {
        "finished": JobState.FINISHED,
        "done": JobState.FINISHED,
        "preempted": JobState.PREEMPTED,
        "failed": JobState.FAILED,
        "preempting": JobState.PREEMPTING,
        "restarting": JobState.RESTARTING,
        "rejoining": JobState.RESTARTING,
        "initializing": JobState.STARTING,
        "scheduling": JobState.STARTING,
    }
)
"""What the state of a supervisor, or the outcome of a job, says by itself; "running" says nothing
more.
"""

_ADVICE = {
    "failed": "Read the last lines of that process's log: its own error is there.",
    "unheard": "Look at that process on its host: `holdfast status` there says more.",
    "crossed": "Let all processes call the same things in the same order.",
    "elsewhere": (
        "Look at that line. `holdfast status --stacks` shows every thread;"
        " A launcher with --stall-timeout-s ends such an attempt, and starts the next one."
    ),
    "missed": "Look what keeps that process: `holdfast status --stacks` shows every thread.",
    "together": "Look at that line: all processes are there.",
    "trouble": "Mend what the sentence names; the job goes on meanwhile.",
    "slow": "Look at that process: its input, its disk, and what else runs on its host.",
    "gathering": (
        "Look at the logs of those processes. Each has to call holdfast.multihost.initialize()."
    ),
}
_NO_REACH_ADVICE = (
    "Look whether the coordinator's process runs, and whether its address can be reached from here."
)
_WAITING_ADVICE = (
    "The job starts by itself when there is room. It gives up after --startup-timeout-s."
)
_ADVICE_AT_END = {
    JobState.FAILED: (
        "Mend the cause, and run the same command again: the job goes on from its last saved step."
    ),
    JobState.PREEMPTED: "Run the same command again: the job goes on from its last saved step.",
}


def judge(
    status: session_pb2.StatusResponse, findings: Sequence[Finding] = (), *, gone: str = ""
) -> Verdict:
    """Returns how a job is. `gone` says why there is no newer status than this one."""
    launcher = status.launcher
    by_launcher = BY_LAUNCHER.get(launcher.state)
    if by_launcher is JobState.STARTING and launcher.waiting_for:
        return Verdict(JobState.WAITING, launcher.waiting_for, _WAITING_ADVICE)
    if by_launcher is JobState.STARTING and launcher.attempt > 1:
        by_launcher = JobState.RESTARTING
    if by_launcher is not None:
        return Verdict(by_launcher, launcher.why, _ADVICE_AT_END.get(by_launcher, ""))
    if gone and launcher.state and not status.num_processes:
        return Verdict(JobState.STARTING, launcher.why)
    if gone:
        return Verdict(JobState.UNREACHABLE, gone, _NO_REACH_ADVICE)
    return _by_processes(status, findings)


def _by_processes(status: session_pb2.StatusResponse, findings: Sequence[Finding]) -> Verdict:
    """Returns how a job is whose processes are meant to run."""
    first = findings[0] if findings else None
    if first is not None and first.kind == "failed":
        return _of(JobState.FAILED, first)
    tasks = status.tasks
    came = [task for task in tasks if task.state != coordination_pb2.UNINITIALIZED]
    if came and all(task.state == coordination_pb2.DISCONNECTED for task in came):
        return Verdict(
            JobState.FINISHED, _everybody(len(came), "has left in order", "have left in order")
        )
    if status.phase == "gathering" or not came:
        if first is not None:
            return _of(JobState.STARTING, first)
        return Verdict(
            JobState.STARTING, f"{len(came):,} of {counted(len(tasks), 'process')} joined"
        )
    # At the end of a program as after a notice, which the launcher knows of.
    leaving = [task for task in came if task.progress.values.get("leaving", 0.0)]
    if len(leaving) == len(came):
        return Verdict(JobState.HEALTHY, _everybody(len(came), "is done", "are done"))
    return _by_steps(status, first)


def _by_steps(status: session_pb2.StatusResponse, first: Finding | None) -> Verdict:
    """Returns how a job is whose processes have joined."""
    stepped = any(task.step_age_s >= 0 for task in status.tasks)
    still_s = stalled_s(status)
    if still_s is not None:
        state = JobState.SLOW
        if still_s > HUNG_S or (first is not None and first.kind not in _NOT_BLOCKING):
            state = JobState.HUNG
        if first is not None:
            return _of(state, first)
        return Verdict(state, f"no process has made a step for {still_s:.0f} s", "")
    if first is None:
        return _without_findings(status, stepped=stepped)
    if first.kind == "trouble":
        return _of(JobState.TROUBLE, first)
    # Steps come, so what keeps processes waiting does not keep the job from getting on.
    return _of(JobState.SLOW if stepped else JobState.HUNG, first)


_NOT_BLOCKING = frozenset({"trouble", "slow", "together"})
"""Kinds of findings that do not say by themselves that a job stands."""


def _without_findings(status: session_pb2.StatusResponse, *, stepped: bool) -> Verdict:
    count = len(status.tasks)
    if not stepped:
        joined = _everybody(count, "has joined", "have joined")
        return Verdict(JobState.STARTING, f"{joined}; no step has been reported yet")
    pace = fastest(status)
    usual = usually_fastest(status)
    if 0 < pace < _SLOW_SHARE * usual:
        text = f"{show_rate(pace)} steps/s; it made {show_rate(usual)} at best"
        return Verdict(JobState.SLOW, text, "Look what has changed since: input, hosts, network.")
    return Verdict(JobState.HEALTHY, _everybody(count, "gets on", "get on"))


def _everybody(count: int, one: str, several: str) -> str:
    return f"all {count} processes {several}" if count > 1 else f"its process {one}"


def _of(state: JobState, finding: Finding) -> Verdict:
    return Verdict(state, finding.text, _ADVICE.get(finding.kind, ""))
