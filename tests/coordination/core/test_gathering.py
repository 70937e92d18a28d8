"""The shutdown barrier: all tasks leave together, or learn who holds them."""

from __future__ import annotations

import math

from holdfast.coordination.core.calls import Call
from holdfast.coordination.core.status import Code
from tests.support.driver import Driver


def leave(driver: Driver, task_id: int, timeout_s: float | None = None) -> Call:
    return driver.make(
        driver.machine.shut_down, task_id, math.inf if timeout_s is None else timeout_s
    )


def test_shutdown_is_a_barrier_of_the_rest() -> None:
    """All leave together; a time-out names who has not come; who left alone is not waited for."""
    driver = Driver(3)
    late = leave(driver, 0, 2.0)
    driver.wait(3, beating=(0, 1, 2))
    expected = (
        "Shutdown barrier has failed: 1 of 3 had come, missing processes 1 (host b1, silent for 0.0"
        " s), 2 (host b2, silent for 0.0 s)"
    )
    assert driver.message(late) == expected
    assert driver.value(leave(driver, 2, 0)) is None
    calls = [leave(driver, task_id) for task_id in range(2)]
    assert [driver.answers[call] for call in calls] == [(None, None)] * 2
    assert driver.machine.all_shut_down()


def test_a_task_in_error_fails_the_shutdown() -> None:
    """Those who wait learn at once who is lost, and so does everybody who polls."""
    driver = Driver(3)
    poll = driver.make(driver.machine.polls.poll, 2)
    waiting = [leave(driver, 0), leave(driver, 1)]
    driver.make(lambda call: driver.machine.report_error(call, Code.INTERNAL, "boom"), 2)
    assert {driver.code(call) for call in waiting} == {Code.INTERNAL}
    assert driver.message(waiting[0]).startswith(
        "Shutdown barrier has failed: 2 of 3 had come, missing process 2 (host b2,"
    )
    assert driver.code(poll) is Code.INTERNAL


def test_a_newer_call_takes_the_olders_place() -> None:
    """The older one is CANCELLED; the newer one ends with the others."""
    driver = Driver(2)
    older = leave(driver, 0)
    newer = leave(driver, 0)
    assert driver.code(older) is Code.CANCELLED and driver.code(newer) is None
    leave(driver, 1)
    assert driver.code(newer) is Code.OK


def test_a_dropped_call_is_waited_for_again() -> None:
    """A dropped call no longer counts as arrived."""
    driver = Driver(2)
    gone = leave(driver, 0)
    gone.drop()
    assert not driver.machine.shutdown_barrier
    waiting = leave(driver, 1)
    assert driver.code(waiting) is None
    leave(driver, 0)
    assert driver.code(waiting) is Code.OK and driver.machine.all_shut_down()


def test_a_recoverable_job_has_no_shutdown_barrier() -> None:
    """Each task leaves alone, at once."""
    driver = Driver(2, recoverable=True)
    assert driver.code(leave(driver, 0)) is Code.OK
    assert not driver.machine.task_table.connected(0) and driver.machine.task_table.connected(1)
