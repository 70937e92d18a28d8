"""Lives of tasks in the pure machine: how they come, over which channels, whose they are, how errors reach the others, how they leave."""

from __future__ import annotations

from holdfast.coordination.core import journal_codec
from holdfast.coordination.core.machine import Machine
from holdfast.coordination.core.status import Code, Status
from holdfast.coordination.core.task_table import TaskState
from holdfast.coordination.server.admission import TaskOwners
from tests.support.driver import Driver


def test_agents_register_together() -> None:
    """Registration ends when all have come; a newer life of one that waits makes the older ALREADY_EXISTS."""
    driver = Driver(2, sessions=False)
    first = driver.register(0, 11)
    second = driver.register(0, 12)
    assert driver.code(first) is Code.ALREADY_EXISTS and driver.code(second) is None
    third = driver.register(1, 21)
    assert driver.answers[second] == driver.answers[third] == (7, None)
    assert driver.answers[driver.register(1, 21)] == (7, None)
    assert driver.code(driver.register(9, 1)) is Code.INVALID_ARGUMENT


def test_a_restart_is_refused_unless_the_job_is_recoverable() -> None:
    """Strict: ABORTED, and the error reaches every poll. Recoverable: it reconnects silently."""
    for recoverable in (False, True):
        driver = Driver(2, sessions=False, recoverable=recoverable)
        driver.register(0, 10)
        driver.register(1, 20)
        poll = driver.call()
        driver.machine.poll_for_error(poll, 0, driver.now)
        again = driver.register(1, 21)
        assert driver.code(again) is (Code.OK if recoverable else Code.ABORTED)
        assert driver.code(poll) is (None if recoverable else Code.ABORTED)


def test_an_error_reaches_every_poll_and_the_heartbeat_of_the_failed() -> None:
    """Silence is UNAVAILABLE with who and how long; no poll is ever answered OK."""
    driver = Driver(2, sessions=False)
    driver.register(0, 10)
    driver.register(1, 20)
    polls = [driver.call(), driver.call()]
    for task_id, call in enumerate(polls):
        driver.machine.poll_for_error(call, task_id, driver.now)
    for _ in range(24):
        driver.machine.heartbeat(driver.call(), 0, 10, driver.now)
        driver.wait(0.5)
    assert {driver.code(call) for call in polls} == {Code.UNAVAILABLE}
    assert driver.message(polls[0]) == "process 1 (silent for 11 s) is lost: its heartbeat timeout is 10 s"
    beat = driver.call()
    driver.machine.heartbeat(beat, 1, 20, driver.now)
    assert driver.settle()[beat][1].code is Code.UNAVAILABLE  # type: ignore[union-attr]


def test_two_channels_are_one_task() -> None:
    """With a Session the agent's silence does not count, its shutdown leaves the task, and a new Session's agent may register."""
    driver = Driver(2, recoverable=True)
    driver.register(0, 10)
    driver.wait(15, beating=(0, 1))
    assert driver.machine.task_table.tasks[0].state is TaskState.CONNECTED
    call = driver.call()
    driver.machine.shut_down(call, 0, False, driver.now)
    assert driver.settle()[call] == (None, None)
    assert driver.machine.task_table.tasks[0].state is TaskState.CONNECTED
    assert driver.open(0, life=2) is None
    assert driver.answers[driver.register(0, 11)] == (7, None)
    stale = driver.machine.identify(None, 10, 7, driver.now)
    assert isinstance(stale, Status) and stale.code is Code.ABORTED


def test_shutdown_is_a_barrier_over_those_who_are_left() -> None:
    """All leave together; a time-out names who has not come; who left alone is not waited for; afterwards polls are CANCELLED."""
    driver = Driver(3)
    polls = driver.call()
    driver.machine.poll_for_error(polls, 0, driver.now)
    late = driver.call()
    driver.machine.shut_down(late, 0, True, driver.now, 2.0)
    driver.wait(3, beating=(0, 1, 2))
    expected = (
        "Shutdown barrier has failed: 1 of 3 had come, missing processes 1 (host b1, silent for 0.0 s), 2 (host b2, silent for 0.0 s)"
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


def test_alive_answers_when_every_living_member_has_asked() -> None:
    """The dead are not waited for, and are not in the answer; a caller outside the set is INVALID_ARGUMENT."""
    driver = Driver(3, recoverable=True)
    calls = [driver.call(), driver.call()]
    for task_id, call in enumerate(calls):
        driver.machine.liveness.arrive(call, task_id, [0, 1, 2, 99], driver.now)
    assert not driver.settle().keys() & set(calls)
    driver.wait(12, beating=(0, 1))
    assert [driver.answers[call][0] for call in calls] == [[0, 1], [0, 1]]
    outside = driver.call()
    driver.machine.liveness.arrive(outside, 0, [1, 2], driver.now)
    assert driver.settle()[outside][1].code is Code.INVALID_ARGUMENT  # type: ignore[union-attr]


def test_a_watch_waits_for_a_newer_version() -> None:
    """-1 answers now, the current version waits, one from the future is INVALID_ARGUMENT."""
    driver = Driver(2)
    now, later, never = driver.call(), driver.call(), driver.call()
    version = driver.machine.task_table.version
    driver.machine.watches.watch(now, -1)
    driver.machine.watches.watch(later, version)
    driver.machine.watches.watch(never, version + 5)
    assert driver.settle()[now] == (version, None) and driver.code(never) is Code.INVALID_ARGUMENT
    driver.wait(12, beating=(0,))
    assert driver.answers[later][0] > version


def test_no_refusal_holds_an_incarnation() -> None:
    """What another life of the service is told is what it had said itself."""
    driver = Driver(2)
    status = driver.machine.identify(0, 100, 999, driver.now)
    assert isinstance(status, Status) and status.mismatch == 999 and "7" not in status.message


def test_nothing_grows_without_a_journal() -> None:
    """Names of keys and barriers that are gone are not kept for a journal that is not there."""
    driver = Driver(2)
    driver.set("a", b"1")
    driver.barrier(0)
    driver.machine.forget_changes()
    assert journal_codec.drain(driver.machine, 0.0) == []


def test_an_agent_cannot_come_with_the_incarnation_of_another() -> None:
    """Profile A knows who calls by it: a second task that brings it is refused, and the first one's calls stay its own."""
    driver = Driver(2, sessions=False, recoverable=True)
    driver.register(0, 50)
    driver.register(1, 51)
    assert driver.code(driver.register(1, 50)) is Code.INVALID_ARGUMENT
    assert [driver.machine.identify(None, incarnation, 7, driver.now) for incarnation in (50, 51)] == [0, 1]


def test_a_task_is_its_keys_while_it_is_held() -> None:
    """While it waits for the others or is there, and after a replay of the journal, no other key is let in; once it is lost, any is."""
    driver = Driver(2, sessions=False, recoverable=True)

    def codes(task_id: int, key: str, owners: TaskOwners) -> tuple[Code | None, Code | None]:
        found = owners.may_join(task_id, key), owners.may_call(task_id, key)
        return found[0] and found[0].code, found[1] and found[1].code  # type: ignore[return-value]

    denied = (Code.PERMISSION_DENIED, Code.PERMISSION_DENIED)
    owners = TaskOwners(driver.machine)
    assert codes(0, "mine", owners) == (None, None) and codes(0, "", owners) == denied
    driver.register(0, 50)
    assert codes(0, "yours", owners) == denied  # it waits for the others
    assert codes(1, "yours", owners) == (None, None)
    driver.register(1, 51)
    assert codes(0, "yours", owners) == denied and owners.may_call(-1, "yours") is None and owners.may_call(-1, "nobody's") is not None
    rows = journal_codec.drain(driver.machine, 0.0)
    assert not any(key in (row.value or b"") for row in rows for key in (b"mine", b"yours"))  # a digest is enough
    again = Machine(driver.config, driver.now)
    journal_codec.load(again, rows, driver.now, 0.0)
    assert codes(0, "yours", TaskOwners(again)) == denied and codes(0, "mine", TaskOwners(again)) == (None, None)
    assert owners.may_join(0, "yours", has_stream=False).code is Code.UNAVAILABLE  # type: ignore[union-attr]
    driver.wait(12, beating=(1,))
    assert driver.machine.task_table.tasks[0].state is TaskState.ERROR
    assert codes(0, "yours", owners) == (None, None)
    assert owners.may_call(0, "mine") is not None
