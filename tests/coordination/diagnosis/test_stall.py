"""When a launcher takes a job for hanging, by the steps that its processes report, and whom it
calls a straggler.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from holdfast.coordination.diagnosis.findings import Evidence
from holdfast.coordination.diagnosis.stall import (
    StallRule,
    describe_stragglers,
    find_stall,
    find_stragglers,
)
from holdfast.proto import coordination_pb2, session_pb2

RULE = StallRule(timeout_s=30, first_step_s=600, straggler_steps=10)


def job(steps: list[int | None], ages_s: list[float], **fields: Any) -> session_pb2.StatusResponse:
    """Returns the status of a job whose processes report every 2 s; None: it never reported a
    step.
    """
    status = session_pb2.StatusResponse(
        **{"num_processes": len(steps), "phase": "running", "up_s": 100} | fields
    )
    for number, (step, age_s) in enumerate(zip(steps, ages_s, strict=True)):
        task = status.tasks.add(
            task_id=number, state=coordination_pb2.CONNECTED, host=f"b{number}", step_age_s=age_s
        )
        task.progress.values["report_interval_s"] = 2.0
        if step is None:
            task.step_age_s = -1
        else:
            task.progress.step = step
    return status


def test_a_job_without_a_step_of_anybody_hangs() -> None:
    """The time is that since the last step of all; one that is younger than the timeout is enough
    to get on.
    """
    assert (
        find_stall(job([7, 7, 7], [31, 33, 40]), RULE)
        == "no process has made a step for 31 s, since step 7"
    )
    assert find_stall(job([7, 7, 7], [29, 33, 40]), RULE) == ""


def test_who_is_behind_and_stands_still_hangs() -> None:
    """It is named, with how far it is behind the median; one that is ahead and waits is not, nor
    one that never reports.
    """
    status = job([90, 40, 100, None], [1, 45, 1, 0])
    assert (
        find_stall(status, RULE)
        == "process 1 (host b1) is at step 40, 50 behind the median, and no step further for 45 s"
    )
    assert find_stall(job([100, 90, 90], [45, 1, 1]), RULE) == ""
    assert (
        find_stall(job([10, 90], [45, 1]), RULE)
        == "process 0 (host b0) is at step 10, 40 behind the median, and no step further for 45 s"
    )


def test_who_is_done_is_not_waited_for() -> None:
    """A process that has reported its end may write its results for as long as it likes."""
    status = job([7, 100, 7], [45, 45, 45])
    status.tasks[0].state = coordination_pb2.DISCONNECTED
    status.tasks[1].progress.values["done"] = 1.0
    status.tasks[2].progress.values["leaving"] = 1.0
    assert find_stall(status, RULE) == ""


def test_a_job_that_has_left_hangs_no_more() -> None:
    """Processes that never reported a step, and have left in order, may live on for as long as they
    like; one that has not come may come yet.
    """
    status = job([None, None], [0, 0], up_s=601)
    assert find_stall(status, RULE).startswith("no process has reported a step within 600 s")
    for task in status.tasks:
        task.state = coordination_pb2.DISCONNECTED
    assert find_stall(status, RULE) == ""
    status.phase = "gathering"
    assert find_stall(status, RULE) != ""


def test_no_timeout_below_two_reports_counts() -> None:
    """Steps that come all the time are seen every 2 s only, or every 16 s in a job of thousands."""
    brief = StallRule(timeout_s=0.5, first_step_s=600, straggler_steps=math.inf)
    assert find_stall(job([7, 7], [3.9, 3.9]), brief) == "" and find_stall(
        job([7, 7], [4.1, 4.1]), brief
    )


@pytest.mark.parametrize("waited_s", [0.0, 3000.0])
@pytest.mark.parametrize("after_s", [599.0, 601.0])
def test_the_first_step_has_its_own_time(after_s: float, waited_s: float) -> None:
    """It compiles, and restores. The attempt begins after its coordinator, if that was ahead."""
    status = job([None, None], [0, 0])
    status.up_s = waited_s + after_s
    assert find_stall(status, replace(RULE, waited_s=waited_s)) == (
        "no process has reported a step within 600 s of its start" if after_s > 600 else ""
    )


def test_stragglers_are_so_many_steps_behind_the_median() -> None:
    """With where the first of them is, where that is known."""
    status = job([100, 89, 100, 90], [1, 1, 1, 1])
    assert [task.task_id for task in find_stragglers(job([100, 90, 100, 90], [1] * 4), RULE)] == []
    status.tasks[0].progress.step = status.tasks[2].progress.step = 110
    assert [task.task_id for task in find_stragglers(status, RULE)] == [1]
    stacks = {1: ['Thread MainThread:\n  File "/home/me/train.py", line 26, in load_batch']}
    assert (
        describe_stragglers(Evidence(status, stacks), [status.tasks[1]])
        == "process 1 (host b1) is at step 89, 11 behind the median (in load_batch, train.py:26)"
    )
    assert find_stragglers(session_pb2.StatusResponse(), RULE) == []
