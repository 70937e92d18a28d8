"""Watches: a call that knows a version is answered when there is a newer one."""

from __future__ import annotations

from holdfast.coordination.core.status import Code
from tests.support.driver import Driver


def test_a_watch_waits_for_a_newer_version() -> None:
    """-1 answers now, the current version waits, one from the future is INVALID_ARGUMENT."""
    driver = Driver(2)
    now = driver.call()
    later = driver.call()
    never = driver.call()
    version = driver.machine.task_table.version
    driver.machine.watches.watch(now, -1)
    driver.machine.watches.watch(later, version)
    driver.machine.watches.watch(never, version + 5)
    assert driver.settle()[now] == (version, None) and driver.code(never) is Code.INVALID_ARGUMENT
    driver.wait(12, beating=(0,))
    assert driver.answers[later][0] > version


def test_a_watch_without_a_client_is_never_answered() -> None:
    """It is dropped once, and a change answers the others alone."""
    driver = Driver(2)
    watches = driver.machine.watches
    version = driver.machine.task_table.version
    gone, kept = [driver.make(lambda call: watches.watch(call, version)) for _ in range(2)]
    gone.drop()
    driver.machine.task_table.touch(driver.machine.task_table.tasks[0])
    driver.settle()
    assert driver.value(kept) == version + 1 and driver.code(gone) is None


def test_a_change_answers_a_watch_once() -> None:
    """The next change needs another watch."""
    driver = Driver(2, recoverable=True)
    call = driver.make(
        lambda call: driver.machine.watches.watch(call, driver.machine.task_table.version)
    )
    for life in (2, 3):
        assert driver.open(1, life=life) is None
    driver.settle()  # which fails where a call is answered twice
    assert driver.code(call) is Code.OK
