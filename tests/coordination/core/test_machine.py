"""The state machine's rules that span its parts: silence, errors, polls, reports, and calls that go
away.
"""

from __future__ import annotations

import math

from holdfast.coordination.core.status import Code, Status
from holdfast.coordination.core.task_table import TaskState
from holdfast.coordination.limits import Limits
from holdfast.coordination.names import GROW_KEY, LAST_WORDS, NEXT_KEY
from tests.support.driver import CountedLooks, Driver


def test_an_error_reaches_polls_and_the_failed_heartbeat() -> None:
    """Silence is UNAVAILABLE with who and how long; no poll is ever answered OK."""
    driver = Driver(2, sessions=False)
    driver.register(0, 10)
    driver.register(1, 20)
    polls = [driver.make(driver.machine.polls.poll, task_id) for task_id in range(2)]
    for _ in range(24):
        driver.machine.heartbeat(driver.call(session=False))
        driver.wait(0.5)
    assert {driver.code(call) for call in polls} == {Code.UNAVAILABLE}
    assert (
        driver.message(polls[0])
        == "process 1 (silent for 11 s) is lost: its heartbeat timeout is 10 s"
    )
    beat = driver.make(driver.machine.heartbeat, 1, session=False)
    assert driver.code(beat) is Code.UNAVAILABLE


def test_no_error_holds_an_incarnation() -> None:
    """What another life of the service is told is what it had said itself."""
    driver = Driver(2)
    status = driver.machine.identify(0, 100, 999, driver.now)
    assert isinstance(status, Status) and status.mismatch == 999 and "7" not in status.message


def test_a_poll_is_never_answered_ok() -> None:
    """Not connected, survivable, or taken over by a newer poll: always an error, which jaxlib's
    client survives.
    """
    driver = Driver(2, sessions=False)
    poll = driver.machine.polls.poll
    assert driver.code(driver.make(poll)) is Code.FAILED_PRECONDITION
    for task_id in range(2):
        driver.register(task_id, 10 + task_id)
    older = driver.make(poll)
    assert driver.code(older) is None
    newer = driver.make(poll)
    assert driver.code(older) is Code.CANCELLED and driver.code(newer) is None
    survivable = Driver(1, survivable=True)
    assert survivable.code(survivable.make(survivable.machine.polls.poll)) is Code.CANCELLED


def test_a_reported_error_is_cut_to_size() -> None:
    """A long text is cut between characters; a number that is no code is UNKNOWN; the task cannot
    report twice.
    """
    driver = Driver(2, limits=Limits(error_bytes=7))
    done = driver.make(lambda call: driver.machine.report_error(call, 99, "\u00e9" * 9))
    assert driver.code(done) is Code.OK
    error = driver.machine.task_table.tasks[0].error
    assert (
        error is not None
        and error.code is Code.UNKNOWN
        and error.message == "process 0 reported: \u00e9\u00e9\u00e9"
        and error.reported
    )
    again = driver.make(lambda call: driver.machine.report_error(call, 13, "x"))
    assert (
        driver.code(again) is Code.FAILED_PRECONDITION
        and driver.message(again) == "process 0 is not connected"
    )


def test_reports_add_up_within_bounds() -> None:
    """What a report leaves out keeps its value; too many values, or a long name, are refused and
    change nothing.
    """
    driver = Driver(1, limits=Limits(report_values=2))
    assert driver.code(driver.report(step=3, values={"loss": 0.5})) is Code.OK
    more = driver.report(saved_step=2, values={"lr": 0.1}, trouble="full")
    assert driver.code(more) is Code.OK
    progress = driver.machine.task_table.tasks[0].progress
    assert (progress.step, progress.saved_step, progress.values, progress.trouble) == (
        3,
        2,
        {"loss": 0.5, "lr": 0.1},
        "full",
    )
    for values in ({"more": 1.0}, {"n" * 101: 1.0}):
        refused = driver.report(step=9, saved_step=9, values=values)
        assert driver.code(refused) is Code.RESOURCE_EXHAUSTED
    assert progress.step == 3 and len(progress.values) == 2


def test_calls_that_go_away_are_never_answered() -> None:
    """Whatever a call waits for, dropping it leaves nothing that could answer it; an arrival at a
    barrier stays.
    """
    driver = Driver(2, recoverable=True)
    machine = driver.machine
    calls = [
        driver.barrier(0, timeout_s=3),
        driver.get("k", timeout_s=3),
        driver.make(lambda call: machine.watches.watch(call, machine.task_table.version)),
        driver.make(lambda call: machine.liveness.arrive(call, frozenset((0, 1))), 0, 3),
        driver.make(machine.polls.poll),
    ]
    for call in calls:
        call.drop()
    assert machine.waiting_calls() == {}
    assert driver.value(driver.barrier(1)) == 0
    driver.set("k", b"1")
    driver.wait(12, beating=(0,))
    assert not set(calls) & driver.answers.keys()


def test_waiting_calls_are_counted_by_task() -> None:
    """Gets and barriers count, a thread of ours that listens does not; tasks that wait for nothing
    are not listed.
    """
    driver = Driver(3)
    driver.get(NEXT_KEY, task_id=0)
    driver.get(GROW_KEY, task_id=0)
    driver.get("k", task_id=1)
    driver.barrier(1)
    driver.barrier(2)
    assert driver.machine.waiting_calls() == {1: 2, 2: 1}


def test_a_heartbeat_is_answered_with_its_tasks_state() -> None:
    """Unregistered and former lives are refused; the living get the service's incarnation."""
    driver = Driver(2, sessions=False, recoverable=True)

    def beat(task_id: int, incarnation: int) -> Code | None:
        return driver.code(
            driver.make(driver.machine.heartbeat, task_id, session=False, incarnation=incarnation)
        )

    assert beat(0, 1) is Code.INVALID_ARGUMENT
    for task_id in range(2):
        driver.register(task_id, 10 + task_id)
    assert (beat(0, 10), beat(0, 99)) == (Code.OK, Code.ABORTED)


def test_an_agents_heartbeat_speaks_for_its_process() -> None:
    """While the stream of the Session beside it is open: the process may hold the interpreter in a
    call of C. Without a stream it speaks for nobody: the client has closed, or given up.
    """
    driver = Driver(2, recoverable=True)
    tasks = driver.machine.task_table.tasks
    driver.register(0, 50)

    def beat_for(seconds: int) -> None:
        for _ in range(seconds):
            driver.make(driver.machine.heartbeat, session=False, incarnation=50)
            driver.wait(1, beating=(1,))

    beat_for(30)
    assert tasks[0].state is TaskState.CONNECTED
    driver.machine.detach(0)
    beat_for(30)
    assert tasks[0].state is TaskState.ERROR


def test_a_call_names_its_task_by_its_incarnation() -> None:
    """A number that the job has not is INVALID_ARGUMENT; an incarnation that nobody has is a former
    life.
    """
    driver = Driver(2, sessions=False)
    for task_id in range(2):
        driver.register(task_id, 10 + task_id)
    identify = driver.machine.identify
    assert (identify(None, 11, 7, 0.0), identify(0, 10, 7, 0.0)) == (1, 0)
    for task_id, incarnation, code in (
        (9, 10, Code.INVALID_ARGUMENT),
        (1, 10, Code.ABORTED),
        (None, 99, Code.ABORTED),
    ):
        status = identify(task_id, incarnation, 7, 0.0)
        assert isinstance(status, Status) and status.code is code


def test_the_end_of_a_job() -> None:
    """`over_since` is when the last task went, lost or not; `all_shut_down` holds only where all
    have left.
    """
    driver = Driver(2, recoverable=True)
    assert driver.machine.over_since() is None
    driver.make(driver.machine.shut_down, 0)
    assert driver.machine.over_since() is None and not driver.machine.all_shut_down()
    driver.wait(12)
    assert driver.machine.task_table.tasks[1].state is TaskState.ERROR
    since = driver.machine.over_since()
    assert since is not None and 10 <= since <= 12 and not driver.machine.all_shut_down()
    assert driver.machine.next_due() < math.inf  # it goes on looking for those who fall silent


def test_nobody_connected_is_silent_while_the_job_gathers() -> None:
    """A process that waits three timeouts for the last one is there when that comes, and has its
    whole timeout from then on.
    """
    driver = Driver(2, sessions=False)
    assert driver.open(0) is None
    waiting = driver.make(driver.machine.registration.wait_for_all)
    driver.wait(30)
    assert driver.open(1) is None
    driver.settle()
    assert driver.value(waiting) == 7
    driver.wait(9.5)
    assert driver.machine.task_table.connected_count == 2


def test_who_leaves_while_the_job_gathers_may_return() -> None:
    """The wait of the other names it beside the one that never came; nobody is told of an error,
    and the same process may come back.
    """
    driver = Driver(3, sessions=False)
    assert driver.open(0) is None and driver.open(1) is None
    driver.machine.task_table.tasks[1].attached = False
    waiting = driver.make(driver.machine.registration.wait_for_all, 0, 15.0)
    poll = driver.make(driver.machine.polls.poll)
    driver.wait(16)
    expected = (
        "1 of 3 registered, missing processes 1 (host b1, silent for 15 s), 2 (never seen); waited"
        " 15.0 s"
    )
    assert driver.message(waiting) == expected and driver.code(poll) is None
    assert (
        driver.open(1) is None and driver.open(2) is None and driver.machine.registration.gathered
    )


def test_a_standstill_of_the_service_is_nobodys_silence() -> None:
    """Ticks that come 20 s late take nobody's life; a silence from then on does."""
    driver = Driver(2)
    driver.wait(3, beating=(0, 1))
    driver.now += 20
    driver.machine.tick(driver.now)
    assert driver.machine.task_table.connected_count == 2
    driver.wait(12, beating=(0,))
    assert not driver.machine.task_table.connected(1) and driver.machine.task_table.connected(0)


def test_a_reported_exit_loses_the_process_at_once() -> None:
    """Every wait that needs it ends with its name and how it ended; that life never comes back, the
    next one does.
    """
    driver = Driver(3, recoverable=True)
    met = driver.barrier(0)
    got = driver.get("k", 1, depends_on=(2,))
    unnamed = driver.get("of nobody", 1)
    driver.make(driver.machine.registration.wait_for_all)
    driver.machine.report_exit(2, -9, driver.now)
    assert driver.machine.take_fenced() == [2]
    driver.settle()
    ended = "process 2 (host b2, ended by signal 9) is lost"
    assert driver.message(met) == f"1 of 3 at 'save/100'; it can never be passed: {ended}"
    assert (
        driver.message(got) == f"key 'k' will not be set: {ended}" and driver.code(unnamed) is None
    )
    assert driver.machine.task_table.tasks[2].error == Status(
        Code.UNAVAILABLE, ended, source_task=2
    )
    refused = driver.open(2)
    assert refused is not None and ended in refused.message
    assert driver.open(2, life=2) is None and not driver.machine.task_table.tasks[2].ended


def test_the_last_words_of_a_life_go_with_it() -> None:
    """Its launcher has heard of the end: whoever waits for words of the next life finds none."""
    driver = Driver(2, recoverable=True)
    driver.set(f"{LAST_WORDS}/1", b"ValueError")
    driver.machine.report_error(driver.call(1), 2, "ValueError")
    driver.machine.report_exit(0, 1, driver.now)
    assert driver.machine.keys.values
    driver.machine.report_exit(1, 1, driver.now)
    assert not driver.machine.keys.values and driver.machine.keys.total_bytes == 0


def test_an_exit_after_leaving_is_no_news() -> None:
    """Who said goodbye has DISCONNECTED; before the job has gathered one that ended is merely not
    there.
    """
    driver = Driver(2, sessions=False, recoverable=True)
    assert driver.open(0) is None
    driver.machine.report_exit(1, 0, driver.now)
    driver.machine.report_exit(0, 1, driver.now)
    assert (
        driver.machine.task_table.tasks[0].state is TaskState.DISCONNECTED
        and driver.machine.take_fenced() == []
    )
    assert (
        driver.open(0, life=2) is None
        and driver.open(1) is None
        and driver.machine.registration.gathered
    )
    driver.make(driver.machine.shut_down, 1)
    driver.machine.report_exit(1, 0, driver.now)
    assert driver.machine.task_table.tasks[1].state is TaskState.DISCONNECTED


def test_who_left_in_order_is_not_called_lost() -> None:
    """Waits that need a process that has shut down fail, and say that it has left the job."""
    driver = Driver(3, recoverable=True)
    waiting = driver.get("from/1", depends_on=(1,))
    barrier = driver.barrier(0, "b")
    driver.make(driver.machine.shut_down, 1)
    left = "process 1 (host b1, shut down) has left the job"
    assert driver.message(waiting) == f"key 'from/1' will not be set: {left}"
    assert driver.message(barrier) == f"1 of 3 at 'b'; it can never be passed: {left}"
    driver.machine.report_exit(2, -9, driver.now)
    assert driver.message(driver.barrier(0, "c")).endswith(
        "processes 1 (host b1, shut down), 2 (host b2, ended by signal 9) are lost"
    )


def test_an_exit_ends_gets_that_name_nobody() -> None:
    """jaxlib's agents do not say whom they wait for: those of processes without a Session end by
    the name of the one that ended.
    """
    driver = Driver(3, sessions=False, recoverable=True)
    for task_id in range(3):
        driver.register(task_id, 10 + task_id)
    waits = driver.get("k", 0)
    driver.machine.report_exit(2, 1, driver.now)
    driver.settle()
    assert (
        driver.message(waits)
        == "key 'k' will not be set: process 2 (ended with exit code 1) is lost"
    )


def test_who_leaves_without_goodbye_is_lost_after_grace() -> None:
    """Its side closed it, and it did not come back within 5 s: half of the heartbeat timeout, which
    it keeps otherwise.
    """
    driver = Driver(3, recoverable=True, reconnect_grace_s=5.0)
    met = driver.barrier(0, timeout_s=60)
    driver.machine.suspect(2, driver.now)
    driver.wait(4.5, beating=(0, 1))
    assert driver.code(met) is None
    driver.wait(2, beating=(0, 1))
    cause = "its side closed the connection without a goodbye, and it did not come back within 5 s"
    error = driver.machine.task_table.tasks[2].error
    assert (
        error is not None
        and error.message == f"process 2 (host b2, silent for 6.0 s) is lost: {cause}"
    )
    assert driver.code(met) is Code.INTERNAL and driver.machine.take_fenced() == [2]


def test_who_comes_back_in_time_is_trusted() -> None:
    """A new stream ends the suspicion, as an agent's call does; while the job gathers there is
    none; a standstill is nobody's fault.
    """
    driver = Driver(3, sessions=False, recoverable=True, reconnect_grace_s=2.0)
    driver.register(2, 12)
    for task_id in range(2):
        assert driver.open(task_id) is None
    driver.machine.suspect(0, driver.now)
    driver.machine.suspect(2, driver.now)
    driver.wait(1.5)
    assert driver.open(0) is None and driver.machine.identify(None, 12, 7, driver.now) == 2
    driver.wait(4)
    driver.machine.suspect(1, driver.now)
    driver.now += 20
    driver.machine.tick(driver.now)
    driver.wait(1.5, beating=(0,))
    assert driver.machine.task_table.connected_count == 3
    driver.wait(1, beating=(0,))
    assert not driver.machine.task_table.connected(1)
    waiting = Driver(2, sessions=False, recoverable=True, reconnect_grace_s=2.0)
    assert waiting.open(0) is None
    waiting.machine.suspect(0, 0.0)
    waiting.wait(8)
    assert waiting.machine.task_table.connected(0)


def test_a_lost_agent_is_refused_and_can_end() -> None:
    """Its calls are ABORTED with the reason, it cannot register again, and its shutdown is answered
    OK, which jaxlib's client survives.
    """
    driver = Driver(2, sessions=False, recoverable=True)
    for task_id in range(2):
        driver.register(task_id, 10 + task_id)
    for _ in range(24):
        driver.machine.heartbeat(driver.call(session=False))
        driver.wait(0.5)
    refused = driver.machine.identify(None, 11, 7, driver.now)
    cause = "process 1 (silent for 11 s) is lost: its heartbeat timeout is 10 s"
    sentence = f"this life of process 1 is over: {cause}; end it, and start the process again"
    assert isinstance(refused, Status) and (refused.code, refused.message) == (
        Code.ABORTED,
        sentence,
    )
    assert driver.message(driver.register(1, 11)) == sentence
    assert driver.machine.identify(1, 11, 7, driver.now, lost=True) == 1
    assert driver.code(driver.make(driver.machine.shut_down, 1, session=False)) is Code.OK
    assert driver.value(driver.register(1, 99)) == 7


def test_a_job_left_before_gathering_is_deserted() -> None:
    """One who waits is there; when it has gone, and another that came is given up, nobody is. A job
    that nobody came to is not deserted.
    """
    driver = Driver(3, sessions=False)
    assert not driver.machine.deserted()
    waiting = driver.register(0, 10)
    assert driver.open(1) is None
    waiting.drop()
    assert not driver.machine.deserted()
    driver.machine.task_table.tasks[1].attached = False
    driver.wait(12)
    assert driver.machine.deserted()


def test_an_arrival_looks_at_no_other_task() -> None:
    """300 arrivals each at three kinds of barrier, and 300 waits that end at one moment: a few
    looks at all tasks.
    """
    count = 300
    driver = Driver(count)
    machine = driver.machine
    machine.task_table.tasks = looked = CountedLooks(machine.task_table.tasks)
    members = frozenset(range(count))
    for task_id in range(count):
        driver.barrier(task_id)
        driver.make(lambda call: machine.liveness.arrive(call, members), task_id)
    assert machine.barriers.passed == 1 and looked.looks == 0
    for task_id in range(count):
        driver.make(machine.shut_down, task_id)
    assert machine.all_shut_down() and looked.looks <= 2
    gathering = Driver(count + 1, sessions=False)
    tasks = gathering.machine.task_table.tasks = CountedLooks(gathering.machine.task_table.tasks)
    for task_id in members:
        gathering.open(task_id)
        gathering.make(gathering.machine.registration.wait_for_all, task_id, 5.0)
    gathering.now = 5.0
    gathering.machine.timers.expire(gathering.now)
    assert len(gathering.machine.answers) == count and tasks.looks <= 1
