"""The shutdown barrier: all tasks leave together, or learn who holds them."""

from __future__ import annotations

from holdfast.coordination.core.status import Code
from tests.support.driver import Driver


def leave(driver: Driver, task_id: int, timeout_s: float | None = None) -> int:
    return driver.make(
        lambda call: driver.machine.shut_down(call, task_id, True, driver.now, timeout_s)
    )


def test_shutdown_is_a_barrier_of_the_rest() -> None:
    """All leave together; a time-out names who has not come; who left alone is not waited for;
    afterwards polls are CANCELLED.
    """
    driver = Driver(3)
    polls = driver.call()
    driver.machine.poll_for_error(polls, 0)
    late = driver.call()
    driver.machine.shut_down(late, 0, True, driver.now, 2.0)
    driver.wait(3, beating=(0, 1, 2))
    expected = (
        "Shutdown barrier has failed: 1 of 3 had come, missing processes 1 (host b1, silent for 0.0"
        " s), 2 (host b2, silent for 0.0 s)"
    )
    assert driver.message(late) == expected
    alone = driver.call()
    driver.machine.shut_down(alone, 2, True, driver.now, 0)
    assert driver.settle()[alone] == (None, None)
    calls = [driver.call(), driver.call()]
    for task_id, call in enumerate(calls):
        driver.machine.shut_down(call, task_id, True, driver.now)
    assert [driver.settle()[call] for call in calls] == [(None, None)] * 2
    assert driver.machine.all_shut_down()


def test_a_task_in_error_fails_the_shutdown() -> None:
    """Those who wait learn at once who is lost, and so does everybody who polls."""
    driver = Driver(3)
    poll = driver.make(lambda call: driver.machine.poll_for_error(call, 2))
    waiting = [leave(driver, 0), leave(driver, 1)]
    driver.make(
        lambda call: driver.machine.report_error(call, 2, Code.INTERNAL, "boom", driver.now)
    )
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
    assert driver.machine.shutdown_barrier.waiting() == {0: 0.0}
    driver.machine.drop(gone)
    assert driver.machine.shutdown_barrier.waiting() == {}
    waiting = leave(driver, 1)
    assert driver.code(waiting) is None
    leave(driver, 0)
    assert driver.code(waiting) is Code.OK and driver.machine.all_shut_down()


def test_a_recoverable_job_has_no_shutdown_barrier() -> None:
    """Each task leaves alone, at once."""
    driver = Driver(2, recoverable=True)
    assert driver.code(leave(driver, 0)) is Code.OK
    assert not driver.machine.task_table.connected(0) and driver.machine.task_table.connected(1)
