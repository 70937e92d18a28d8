"""The status of a job: tasks, barriers with who waits and who is missing, keys by prefix, and how
far the job is.
"""

from __future__ import annotations

import pytest

from holdfast.coordination.server.job_status import left_stacks, status_of
from tests.support.driver import Driver


def test_a_status_names_the_waiting_and_the_missing() -> None:
    """An open barrier lists who waits since when, who is missing, and the time left; waiting calls
    are counted by task.
    """
    driver = Driver(3, job="j", attempt=2)
    driver.barrier(0, "save", timeout_s=10)
    driver.wait(4, beating=(0, 1, 2))
    driver.get("k", task_id=0)
    for task_id in (1, 2):
        driver.machine.detach(task_id)
    status = status_of(driver.machine, driver.now)
    (barrier,) = status.barriers
    assert (barrier.barrier_id, list(barrier.missing), barrier.left_s) == ("save", [1, 2], 6.0)
    assert [(each.task_id, each.since_s) for each in barrier.waiting] == [(0, 4.0)]
    assert [task.waiting_calls for task in status.tasks] == [2, 0, 0]
    assert [task.has_session for task in status.tasks] == [True, False, False]
    assert (status.job, status.attempt, status.num_processes, status.up_s) == ("j", 2, 3, 4.0)


def test_a_task_is_shown_as_it_reported() -> None:
    """Host, progress, age, and the sentence of its error."""
    driver = Driver(2, recoverable=True)
    driver.report(step=7, values={"loss": 0.5})
    driver.wait(12, beating=(0,))
    well, lost = status_of(driver.machine, driver.now).tasks
    assert (well.host, well.progress.step, well.progress.values["loss"], well.heartbeat_age_s) == (
        "b0",
        7,
        0.5,
        0.0,
    )
    assert not well.progress.HasField("saved_step") and well.error == ""
    assert (
        lost.error == "process 1 (host b1, silent for 11 s) is lost: its heartbeat timeout is 10 s"
    )


def test_who_is_gone_makes_no_steps() -> None:
    """However fast it was: a rate is of the processes that run."""
    driver = Driver(2, recoverable=True)
    for step in range(5):
        driver.report(step=step)
        driver.wait(0.25, beating=(0, 1))
    assert status_of(driver.machine, driver.now).tasks[0].steps_per_second == 4
    driver.machine.report_exit(0, -9, driver.now)
    assert status_of(driver.machine, driver.now).tasks[0].steps_per_second == 0


def test_a_loop_that_stands_early_has_a_pace() -> None:
    """By which its hang is found: four steps in a second, and none for 11 s."""
    driver = Driver(1)
    for step in range(5):
        driver.report(step=step)
        driver.wait(0.25, beating=(0,))
    (task,) = status_of(driver.machine, driver.now).tasks
    assert task.usual_steps_per_second == 0
    driver.wait(11, beating=(0,))
    (task,) = status_of(driver.machine, driver.now).tasks
    assert (task.steps_per_second, task.usual_steps_per_second) == (0, 4)


def test_a_task_never_seen_has_no_age() -> None:
    """-1 says so, on the wire."""
    driver = Driver(1, sessions=False)
    (task,) = status_of(driver.machine, 5.0).tasks
    assert task.heartbeat_age_s == -1.0


@pytest.mark.parametrize("end", ["lost", "leaving"])
def test_the_phase_is_how_far_the_job_is(end: str) -> None:
    """Gathering until all have come, running, and ending once one is lost or waits to leave."""
    driver = Driver(2, sessions=False)

    def phase() -> str:
        return status_of(driver.machine, driver.now).phase

    driver.open(0)
    assert phase() == "gathering"
    driver.open(1)
    assert phase() == "running"
    if end == "lost":
        driver.wait(12, beating=(0,))
    else:
        driver.make(driver.machine.shut_down)
        (barrier,) = status_of(driver.machine, driver.now).barriers
        assert (barrier.barrier_id, list(barrier.missing), barrier.left_s) == (
            "shutdown",
            [1],
            -1.0,
        )
    assert phase() == "ending"


def test_keys_are_counted_by_their_first_part() -> None:
    """The most numerous first, at most fifty."""
    driver = Driver(1)
    for key in ("b/1", "a/1", "a/2", *(f"p{number}" for number in range(60))):
        driver.set(key, b"xy")
    status = status_of(driver.machine, 0.0)
    assert (status.prefixes[0].prefix, status.prefixes[0].keys, status.prefixes[0].bytes) == (
        "a",
        2,
        4,
    )
    assert len(status.prefixes) == 50 and status.keys == 63


@pytest.mark.parametrize(
    "value", [None, b"", b"{}", b"[]", b"\xff", b'{"why": "stuck"}', b"[" * 100_000]
)
def test_a_report_that_is_none_is_no_error(value: bytes | None) -> None:
    """What anybody may have written under the watchdog's key is not trusted."""
    driver = Driver(1)
    if value is not None:
        driver.set("holdfast/stacks/0", value)
    assert left_stacks(driver.machine, 0) == b""


def test_a_watchdogs_report_outlives_its_process() -> None:
    """Why, and the stacks; what UTF-8 cannot hold is shown as a question mark."""
    driver = Driver(1)
    driver.set("holdfast/stacks/0", b'{"why": "stuck for 60 s", "stacks": "Thread 1 \\ud800"}')
    assert left_stacks(driver.machine, 0) == b"Left by its watchdog: stuck for 60 s\nThread 1 ?"
