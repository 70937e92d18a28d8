"""How a job is, in one word: a table from statuses to states."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.coordination.diagnosis.findings import Finding
from holdfast.coordination.diagnosis.verdict import OVER, JobState, judge
from holdfast.proto import coordination_pb2, session_pb2

ODD = Finding("elsewhere", "process 1 is in load_batch", (1,))
SLOW = Finding("slow", "process 1 keeps the others waiting", (1,))
TROUBLE = Finding("trouble", "process 1: step 7 was not saved: disk full", (1,))
FAILED = Finding("failed", "process 1 was ended by signal 9", (1,))
ABSENT = Finding("gathering", "process 1 has not come yet", (1,))
SILENT = Finding("unheard", "process 1 does not answer", (1,))
TOGETHER = Finding("together", "processes 0 and 1 are in save", (0, 1))


def job(
    phase: str = "running",
    *,
    launcher: dict[str, Any] | None = None,
    states: tuple[Any, Any] = (coordination_pb2.CONNECTED, coordination_pb2.CONNECTED),
    **task: Any,
) -> session_pb2.StatusResponse:
    """Returns the status of a job of two processes that has just made a step, at 4 steps/s."""
    status = session_pb2.StatusResponse(num_processes=2, phase=phase, launcher=launcher or {})
    fields = {"step_age_s": 0.2, "steps_per_second": 4.0, "usual_steps_per_second": 4.0, **task}
    for number, state in enumerate(states):
        status.tasks.add(task_id=number, state=state, heartbeat_age_s=1, **fields)
    return status


def said(state: str, **more: Any) -> dict[str, Any]:
    return {"state": state, "why": f"it is {state}", **more}


ABSENT_STATES = (coordination_pb2.UNINITIALIZED, coordination_pb2.UNINITIALIZED)
LEFT_STATES = (coordination_pb2.DISCONNECTED, coordination_pb2.DISCONNECTED)
STILL = {"step_age_s": 20.0, "steps_per_second": 0.0}
LEAVING = session_pb2.ReportRequest(values={"leaving": 1.0})
NO_STEPS = {"step_age_s": -1.0, "steps_per_second": 0.0, "usual_steps_per_second": 0.0}

TABLE: dict[str, tuple[session_pb2.StatusResponse, tuple[Finding, ...], str, JobState]] = {
    "steps come": (job(), (), "", JobState.HEALTHY),
    "half the pace": (job(steps_per_second=1.9), (), "", JobState.SLOW),
    "one keeps the others": (job(), (SLOW,), "", JobState.SLOW),
    "silent, yet steps come": (job(), (SILENT,), "", JobState.SLOW),
    "a save failed": (job(), (TROUBLE,), "", JobState.TROUBLE),
    "stands, with a culprit": (job(**STILL), (ODD,), "", JobState.HUNG),
    "stands, all at one place": (job(**STILL), (TOGETHER,), "", JobState.SLOW),
    "stands long": (job(**{**STILL, "step_age_s": 70.0}), (), "", JobState.HUNG),
    "no step ever, and somebody is missed": (job(**NO_STEPS), (ODD,), "", JobState.HUNG),
    "joined, no step yet": (job(**NO_STEPS), (), "", JobState.STARTING),
    "gathering": (job("gathering", **NO_STEPS), (), "", JobState.STARTING),
    "one has not come": (job("gathering", **NO_STEPS), (ABSENT,), "", JobState.STARTING),
    "nobody has come": (job(states=ABSENT_STATES, **NO_STEPS), (), "", JobState.STARTING),
    "all have left": (job("ending", states=LEFT_STATES), (), "", JobState.FINISHED),
    "all are in shutdown()": (job(progress=LEAVING, **STILL), (), "", JobState.HEALTHY),
    "a process failed": (job("ending"), (FAILED,), "", JobState.FAILED),
    "no room": (
        session_pb2.StatusResponse(launcher=said("scheduling", waiting_for="room for 1 of 2")),
        (), "", JobState.WAITING,
    ),
    "first attempt, no coordinator yet": (
        session_pb2.StatusResponse(launcher=said("scheduling", attempt=1)),
        (), "there is none", JobState.STARTING,
    ),
    "runs, and no coordinator answered yet": (
        session_pb2.StatusResponse(launcher=said("running", attempt=1)),
        (), "there is none", JobState.STARTING,
    ),
    "second attempt, no coordinator yet": (
        session_pb2.StatusResponse(launcher=said("scheduling", attempt=2)),
        (), "there is none", JobState.RESTARTING,
    ),
    "a notice is out": (job(launcher=said("preempting")), (ODD,), "", JobState.PREEMPTING),
    "an attempt is being ended": (
        job(launcher=said("restarting")), (FAILED,), "it is gone", JobState.RESTARTING,
    ),
    "the launcher says that it runs": (job(launcher=said("running")), (), "", JobState.HEALTHY),
    "over, done": (job(launcher=said("finished")), (ODD,), "gone", JobState.FINISHED),
    "over, failed": (job(launcher=said("failed")), (), "gone", JobState.FAILED),
    "over, preempted": (job(launcher=said("preempted")), (), "gone", JobState.PREEMPTED),
    "no answer": (job(launcher=said("running")), (), "it does not answer", JobState.UNREACHABLE),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_a_job_is_in_one_state(name: str) -> None:
    """And its sentence is there."""
    status, findings, gone, state = TABLE[name]
    verdict = judge(status, findings, gone=gone)
    assert verdict.state is state
    assert verdict.text


def test_every_state_can_be_reached() -> None:
    """By the table above."""
    assert {state for *_, state in TABLE.values()} == set(JobState)


def test_what_needs_somebody_says_what_to_do() -> None:
    """Whatever a person has to mend comes with a next step; a job that gets on with none."""
    needs = {JobState.HUNG, JobState.FAILED, JobState.TROUBLE, JobState.UNREACHABLE}
    for name, (status, findings, gone, state) in TABLE.items():
        verdict = judge(status, findings, gone=gone)
        # Where nobody stands out there is no line to look at.
        if state in needs and (findings or gone):
            assert verdict.advice or state in OVER, name
    assert judge(job()).advice == ""


def test_the_culprits_sentence_is_the_verdicts() -> None:
    """What stands first explains the rest."""
    verdict = judge(job(**STILL), (ODD, TROUBLE))
    assert verdict.text == "process 1 is in load_batch"
    assert verdict.as_json()["state"] == "Hung"
