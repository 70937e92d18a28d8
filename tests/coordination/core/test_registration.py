"""Registration: agents and Sessions come, all are answered together, and a restart is taken back or
refused.
"""

from __future__ import annotations

import pytest

from holdfast.coordination.core.status import Code, Status
from holdfast.coordination.core.task_table import TaskState
from holdfast.coordination.names import NOBODY
from tests.support.driver import Driver


def test_agents_register_together() -> None:
    """Registration ends when all have come; a newer life of one that waits makes the older
    ALREADY_EXISTS.
    """
    driver = Driver(2, sessions=False)
    first = driver.register(0, 11)
    second = driver.register(0, 12)
    assert driver.code(first) is Code.ALREADY_EXISTS and driver.code(second) is None
    third = driver.register(1, 21)
    assert driver.answers[second] == driver.answers[third] == (7, None)
    assert driver.answers[driver.register(1, 21)] == (7, None)
    assert driver.code(driver.register(9, 1)) is Code.INVALID_ARGUMENT


def test_no_agent_joins_an_attempt_that_is_over() -> None:
    """Those that wait are told, and so is one that comes later."""
    driver = Driver(2, sessions=False)
    early = driver.register(0, 10)
    driver.machine.registration.end_attempt("process 1 has failed")
    late = driver.register(1, 20)
    assert [driver.code(call) for call in (early, late)] == [Code.ABORTED] * 2
    assert driver.message(late) == "process 1 has failed"


def test_a_restart_needs_a_recoverable_job() -> None:
    """Strict: ABORTED, and the error reaches every poll. Recoverable: it reconnects silently."""
    for recoverable in (False, True):
        driver = Driver(2, sessions=False, recoverable=recoverable)
        driver.register(0, 10)
        driver.register(1, 20)
        poll = driver.make(driver.machine.polls.poll)
        again = driver.register(1, 21)
        assert driver.code(again) is (Code.OK if recoverable else Code.ABORTED)
        assert driver.code(poll) is (None if recoverable else Code.ABORTED)


def test_two_channels_are_one_task() -> None:
    """With a Session the agent's silence does not count, its shutdown leaves the task, and a new
    Session's agent may register.
    """
    driver = Driver(2, recoverable=True)
    driver.register(0, 10)
    driver.wait(15, beating=(0, 1))
    assert driver.machine.task_table.tasks[0].state is TaskState.CONNECTED
    call = driver.make(driver.machine.shut_down, session=False)
    assert driver.answers[call] == (None, None)
    assert driver.machine.task_table.tasks[0].state is TaskState.CONNECTED
    assert driver.open(0, life=2) is None
    assert driver.answers[driver.register(0, 11)] == (7, None)
    stale = driver.machine.identify(None, 10, 7, driver.now)
    assert isinstance(stale, Status) and stale.code is Code.ABORTED


def test_an_agent_needs_an_incarnation_of_its_own() -> None:
    """Profile A knows who calls by it: a second task that brings it is refused, and the first one's
    calls stay its own.
    """
    driver = Driver(2, sessions=False, recoverable=True)
    driver.register(0, 50)
    driver.register(1, 51)
    assert driver.code(driver.register(1, 50)) is Code.INVALID_ARGUMENT
    assert [
        driver.machine.identify(None, incarnation, 7, driver.now) for incarnation in (50, 51)
    ] == [0, 1]


def test_a_wait_names_who_has_not_come() -> None:
    """A Session that has waited its time learns who is missing; the job may still be completed
    afterwards.
    """
    driver = Driver(3, sessions=False)
    assert driver.open(0) is None
    registration = driver.machine.registration
    late = driver.make(registration.wait_for_all, 0, 2.0)
    driver.wait(3, beating=(0,))
    assert driver.code(late) is Code.DEADLINE_EXCEEDED
    assert (
        driver.message(late)
        == "1 of 3 registered, missing processes 1 (never seen), 2 (never seen); waited 2.0 s"
    )
    again = driver.make(registration.wait_for_all, 0, 60.0)
    assert driver.open(1) is None and not registration.gathered
    agent = driver.register(2, 20)
    assert driver.value(again) == driver.value(agent) == 7 and registration.gathered


def test_a_registration_whose_client_has_gone_is_forgotten() -> None:
    """It counts no longer, neither as there nor as waiting."""
    driver = Driver(2, sessions=False)
    gone = driver.register(0, 10)
    assert driver.machine.waiting_calls() == {0: 1} and driver.machine.registration.held(0)
    gone.drop()
    assert driver.machine.waiting_calls() == {} and not driver.machine.registration.held(0)
    assert driver.code(driver.register(1, 20)) is None


def test_a_session_is_checked_before_it_changes_anything() -> None:
    """A number that the job has not, an incarnation of 0 and a long host name are refused."""
    driver = Driver(2, sessions=False)
    opening = driver.machine.registration.open_session
    refused = [
        opening(9, 1, "h", 1, 0.0),
        opening(0, 0, "h", 1, 0.0),
        opening(0, 1, "h" * 257, 1, 0.0),
    ]
    assert [status and status.code for status in refused] == [
        Code.INVALID_ARGUMENT,
        Code.INVALID_ARGUMENT,
        Code.RESOURCE_EXHAUSTED,
    ]
    assert (
        isinstance(refused[0], Status)
        and refused[0].message == "there is no process 9: the job has 2, 0 to 1"
    )
    assert driver.machine.task_table.tasks[0].state is TaskState.UNINITIALIZED


def test_the_same_incarnation_is_the_same_life() -> None:
    """A stream that broke and is opened again loses nothing, recoverable or not."""
    for recoverable in (False, True):
        driver = Driver(2, recoverable=recoverable)
        waiting = driver.barrier(0)
        assert driver.open(0) is None
        assert (
            driver.code(waiting) is None
            and driver.machine.task_table.tasks[0].state is TaskState.CONNECTED
        )


def test_a_new_life_ends_the_former_one() -> None:
    """Recoverable: barriers of the former life fail, and the new one is connected. Strict: the
    restart is everyone's error.
    """
    driver = Driver(2, recoverable=True)
    waiting = driver.barrier(1)
    assert driver.open(0, life=2) is None
    driver.settle()
    assert driver.code(waiting) is Code.INTERNAL
    assert driver.machine.task_table.connected(0)
    strict = Driver(2)
    poll = strict.make(strict.machine.registration.wait_for_all, 0, 60.0)
    assert strict.value(poll) == 7
    status = strict.open(0, life=2)
    assert (
        status is not None and status.code is Code.ABORTED and strict.machine.polls.error is status
    )
    assert (
        status.message
        == "process 0 cannot come back, the job is not recoverable: it has been restarted"
    )


def test_lives_are_numbered() -> None:
    """A Session and an agent beside it are one life, whichever came first, and so is another agent
    in the agent's place. What comes after a loss, a leaving or a restart is the next one.
    """
    driver = Driver(1, recoverable=True, sessions=False)
    task = driver.machine.task_table.tasks[0]
    driver.register(0, 50)
    assert driver.open(0) is None and driver.open(0) is None
    driver.register(0, 51)
    assert task.life == 1 and task.agent == 51
    assert driver.open(0, life=2) is None
    assert task.life == 2
    driver.machine.report_exit(0, -9, driver.now)
    driver.register(0, 52)
    assert task.life == 3
    driver.make(driver.machine.shut_down, session=False)
    assert driver.open(0, life=4) is None
    assert task.life == 4
    driver.register(0, 53)
    assert task.life == 4


def test_before_gathering_anybody_may_come_again() -> None:
    """A process that dies while others have yet to come is no error, though the job is not
    recoverable.
    """
    driver = Driver(2, sessions=False)
    assert driver.open(0) is None and driver.open(0, life=2) is None
    assert driver.open(1) is None


def test_lost_is_lost() -> None:
    """The incarnation of a Session that was given up, or replaced, is ABORTED for good, also while
    a new life of the process is there.
    """
    driver = Driver(2, recoverable=True)
    driver.wait(12, beating=(0,))
    refused = driver.open(1)
    assert refused is not None and refused.code is Code.ABORTED
    assert refused.message.startswith(
        "this life of process 1 is over: process 1 (host b1, silent for 11 s) is lost"
    )
    assert driver.open(1, life=2) is None and driver.open(1, life=3) is None
    for life in (1, 2):
        late = driver.open(1, life)
        assert late is not None and late.message.startswith(
            "this life of process 1 is over: another life of it has taken its place"
        )
    assert driver.machine.task_table.tasks[
        1
    ].session == 301 and driver.machine.task_table.connected(1)


def test_agents_have_their_timeout_from_the_answer() -> None:
    """jaxlib's clients send no heartbeat before they are registered: the last one may come three
    timeouts after the first.
    """
    driver = Driver(2, sessions=False)
    first = driver.register(0, 10)
    driver.wait(30)
    last = driver.register(1, 11)
    assert driver.value(first) == driver.value(last) == 7
    driver.wait(9.5)
    assert driver.machine.task_table.connected_count == 2


def crash(driver: Driver, *processes: int) -> None:
    """Loses processes, as their launchers report it."""
    for process in processes:
        driver.machine.report_exit(process, 1, driver.now)


def test_new_lives_of_all_gather_again() -> None:
    """Once nobody of the former lives is there, the first that comes waits for the others, and
    finds nothing of theirs: no key, no value, no barrier of other participants.
    """
    driver = Driver(2, recoverable=True)
    driver.set("gloo/0", b"an address")
    wait_for_all = driver.machine.registration.wait_for_all
    assert driver.code(driver.make(wait_for_all, 0)) is Code.OK
    meetings = [driver.barrier(process, "met") for process in (0, 1)]
    assert [driver.code(each) for each in meetings] == [Code.OK] * 2
    crash(driver, 0, 1)
    assert driver.machine.task_table.tasks[0].error is not None, "for whoever looks at it"
    assert driver.machine.keys.values
    driver.machine.take_fenced()

    assert driver.open(1, life=2) is None
    early = driver.make(wait_for_all, 1, incarnation=201)
    assert driver.code(early) is None and not driver.machine.registration.gathered
    told = [event.text for event in driver.machine.events.kept.values()]
    assert "nobody of the former lives is left: the job begins anew" in told
    assert not driver.machine.keys.values and not driver.machine.barriers.finished
    stale = driver.open(0, life=1)
    assert stale is not None and stale.code is Code.ABORTED
    assert driver.open(0, life=2) is None
    driver.settle()
    assert driver.value(early) == 7
    assert driver.code(driver.get("gloo/0", timeout_s=1.0)) is None
    alone = driver.barrier(1, "met", ids=(1,), life=2)
    assert driver.code(alone) is Code.OK


def test_agents_alone_gather_again() -> None:
    """Processes of jaxlib's client, without a Session."""
    driver = Driver(2, sessions=False, recoverable=True)
    for process, incarnation in ((0, 10), (1, 20)):
        driver.register(process, incarnation)
    driver.set("gloo/0", b"an address")
    crash(driver, 0, 1)
    first = driver.register(1, 21)
    assert driver.code(first) is None and not driver.machine.keys.values
    second = driver.register(0, 11)
    assert driver.value(first) == driver.value(second) == 7


@pytest.mark.parametrize("comes_back", [False, True])
def test_who_is_suspect_is_waited_for(comes_back: bool) -> None:
    """Where nobody reports their ends, the connections of all have closed when the first of the new
    lives comes: it has to ask again until the others are lost, or are back.
    """
    driver = Driver(3, recoverable=True)
    driver.set("gloo/0", b"an address")
    crash(driver, 2)
    for process in (0, 1):
        driver.machine.detach(process)
        driver.machine.suspect(process, driver.now)
    early = driver.open(1, life=2)
    assert early is not None and early.code is Code.UNAVAILABLE and "process 0" in early.message
    agent = driver.register(2, 33)
    refused = driver.answers[agent][1]
    assert refused is not None and refused.code is Code.UNAVAILABLE
    assert not refused.from_service, "jaxlib's client tries no further after such"
    if comes_back:
        assert driver.open(0) is None
    else:
        driver.wait(driver.config.reconnect_grace_s + 2.0)
    assert driver.open(1, life=2) is None
    assert driver.machine.registration.gathered is comes_back
    assert bool(driver.machine.keys.values) is comes_back
    stale = driver.open(0)
    assert (stale is None) is comes_back


def test_one_comes_back_to_those_who_live() -> None:
    """It is answered at once, and finds what they have set; one of them is enough. So it is where
    they are about to connect again, and in a strict job nobody comes back.
    """
    driver = Driver(3, recoverable=True)
    driver.set("gloo/0", b"an address")
    crash(driver, 1, 2)
    driver.machine.detach(0)  # the coordinator was started again
    assert driver.open(1, life=2) is None and driver.open(0) is None
    joined = driver.make(driver.machine.registration.wait_for_all, 1, incarnation=201)
    assert driver.value(joined) == 7 and driver.machine.keys.values

    strict = Driver(1)
    crash(strict, 0)
    refused = strict.open(0, life=2)
    assert refused is not None and strict.machine.registration.gathered


def test_who_has_left_may_be_done() -> None:
    """One that died is not kept waiting for it. It may connect again itself, to say goodbye once
    more.
    """
    for comer, life in ((0, 2), (1, 1)):
        driver = Driver(2, recoverable=True)
        driver.set("gloo/0", b"an address")
        driver.make(driver.machine.shut_down, 1)
        crash(driver, 0)
        assert driver.open(comer, life=life) is None
        assert driver.machine.registration.gathered and driver.machine.keys.values


def test_a_second_channel_is_no_new_life() -> None:
    """The Session of a job of one beside its agent, and the agent beside the Session."""
    driver = Driver(1, sessions=False, recoverable=True)
    driver.register(0, 10)
    driver.set("a", b"1")
    assert driver.open(0) is None
    assert driver.value(driver.register(0, 11)) == 7
    assert driver.machine.keys.values == {"a": b"1"}


def test_no_call_of_a_former_life_gets_a_value_of_the_next() -> None:
    """One that waits is told that its life is over; who only looks on waits on."""
    driver = Driver(1, recoverable=True)
    waiting = driver.get("next")
    watching = driver.get("next", NOBODY)
    crash(driver, 0)
    driver.open(0, life=2)
    driver.settle()
    assert driver.code(waiting) is Code.ABORTED
    driver.set("next", b"2")
    assert driver.value(watching) == ("next", b"2")
