"""The coordination service's machine: what each event ends with, and the sentence that says why. No process, no clock."""

from __future__ import annotations

import pytest

from holdfast.coordination.core import journal_codec
from holdfast.coordination.core.keys import normalise
from holdfast.coordination.core.machine import Machine
from holdfast.coordination.core.status import Code
from holdfast.coordination.limits import Limits
from tests.support.driver import Driver

# ---- Barriers ----------------------------------------------------------------------------------------------------------------------


def test_a_barrier_passes_when_the_last_has_come() -> None:
    """Nobody is released before all have come; then all are, with the instance's counter."""
    driver = Driver()
    calls = [driver.barrier(task_id) for task_id in range(3)]
    assert [driver.code(call) for call in calls] == [None, None, None]
    calls.append(driver.barrier(3))
    assert [driver.answers[call] for call in calls] == [(0, None)] * 4


def test_a_timeout_names_all_who_are_missing_with_host_and_silence() -> None:
    """The sentence holds the count, the barrier and each missing process; the status holds them as facts."""
    driver = Driver()
    driver.wait(3, beating=(0, 1, 2))
    calls = [driver.barrier(task_id, timeout_s=9) for task_id in range(3)]
    driver.wait(9.5, beating=(0, 1, 2, 3))
    assert {driver.code(call) for call in calls} == {Code.DEADLINE_EXCEEDED}
    assert driver.message(calls[0]) == "3 of 4 at 'save/100', missing process 3 (host b3, silent for 0.0 s); waited 9.0 s"
    status = driver.answers[calls[0]][1]
    assert status is not None and [missing.task_id for missing in status.missing] == [3] and status.barrier == ("save/100", 0)


def test_a_lost_task_fails_its_barriers_at_once() -> None:
    """Silence past the heartbeat timeout ends every wait that needs the task, naming it; other barriers stay."""
    driver = Driver()
    waiting, apart = driver.barrier(0, timeout_s=100), driver.barrier(0, "pair", timeout_s=100, ids=(0, 1))
    driver.wait(12, beating=(0, 1, 2))
    assert driver.code(waiting) is Code.INTERNAL
    assert driver.message(waiting) == "1 of 4 at 'save/100'; it can never be passed: process 3 (host b3, silent for 11 s) is lost"
    assert driver.code(apart) is None
    assert driver.code(driver.barrier(1, "later")) is Code.INTERNAL


def test_a_barrier_name_is_used_again_by_counting() -> None:
    """The next instance has the next counter; the same counter replays; any other is refused with the service's own."""
    driver = Driver(2)
    for counter in range(3):
        calls = [driver.barrier(task_id, counter=counter) for task_id in range(2)]
        assert [driver.answers[call] for call in calls] == [(counter, None)] * 2
    assert driver.answers[driver.barrier(0, counter=2)] == (2, None)
    wrong = driver.barrier(0, counter=7)
    assert driver.code(wrong) is Code.INTERNAL and driver.answers[wrong][1].barrier == ("save/100", 2)  # type: ignore[union-attr]


def test_a_replay_gives_the_failure_again() -> None:
    """Whoever asks with the counter of a failed instance hears the same failure; the next counter opens anew."""
    driver = Driver(2)
    driver.barrier(0, timeout_s=1)
    driver.wait(2, beating=(0, 1))
    assert driver.code(driver.barrier(1)) is Code.DEADLINE_EXCEEDED
    calls = [driver.barrier(task_id, counter=1) for task_id in range(2)]
    assert [driver.code(call) for call in calls] == [Code.OK, Code.OK]


def test_a_bad_request_harms_only_its_sender() -> None:
    """Outsiders, other participants and repeated ids are INVALID_ARGUMENT, and the barrier goes on."""
    driver = Driver()
    first = driver.barrier(0, ids=(0, 1))
    assert driver.code(driver.barrier(2, ids=(0, 1))) is Code.INVALID_ARGUMENT
    assert driver.code(driver.barrier(1, ids=(0, 1, 2))) is Code.INVALID_ARGUMENT
    assert driver.code(driver.barrier(1, "far", ids=(1, 99))) is Code.INVALID_ARGUMENT
    assert driver.code(first) is None
    second = driver.barrier(1, ids=(0, 1))
    assert driver.code(first) is driver.code(second) is Code.OK


def test_a_newer_call_takes_the_olders_place() -> None:
    """A task waits at one instance with one call."""
    driver = Driver(2)
    older, newer = driver.barrier(0), driver.barrier(0)
    assert driver.code(older) is Code.CANCELLED and driver.code(newer) is None


def test_a_cancelled_barrier_fails_for_those_who_come_later_too() -> None:
    """CancelBarrier ends the instance for all its participants."""
    driver = Driver()
    waiting, call = driver.barrier(0), driver.call()
    driver.machine.barriers.cancel(call, 1, "save/100", 0, driver.now)
    driver.settle()
    assert driver.code(call) is Code.OK and driver.code(waiting) is Code.CANCELLED
    assert driver.message(waiting) == "barrier 'save/100' was cancelled by process 1; 1 of 4 at 'save/100'"
    assert driver.code(driver.barrier(2)) is Code.CANCELLED


def test_a_restarted_process_counts_from_zero_in_a_recoverable_job() -> None:
    """Its first call joins the instance that is open, or opens the next."""
    driver = Driver(2, recoverable=True)
    for counter in range(2):
        for task_id in range(2):
            driver.barrier(task_id, counter=counter)
    assert driver.open(1, life=2) is None
    waiting = driver.barrier(0, counter=2)
    assert driver.code(waiting) is None
    back = driver.barrier(1, counter=0, life=2)
    assert driver.answers[back] == driver.answers[waiting] == (2, None)


def test_a_restart_fails_what_its_former_life_had_come_to() -> None:
    """A barrier never counts the arrival of a former life."""
    driver = Driver(2, recoverable=True)
    driver.barrier(1)
    driver.open(1, life=2)
    waiting = driver.barrier(0, counter=1)
    assert driver.code(waiting) is None


def test_no_instance_outlives_its_limit() -> None:
    """Open barriers are bounded, results are kept up to a bound, and a forgotten name opens with the counter it is called with."""
    driver = Driver(2, limits=Limits(barriers_open=3, barriers_kept=2))
    codes = [driver.code(driver.barrier(0, f"b{number}")) for number in range(4)]
    assert codes == [None, None, None, Code.RESOURCE_EXHAUSTED]
    for number in range(3):
        driver.barrier(1, f"b{number}")
    assert list(driver.machine.barriers.finished) == ["b1", "b2"]
    calls = [driver.barrier(task_id, "b0", counter=1) for task_id in range(2)]
    assert [driver.answers[call] for call in calls] == [(1, None)] * 2


# ---- Keys --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "expected"), [("/a//b/", "a/b"), ("", ""), ("/", ""), ("a", "a"), ("a/b", "a/b"), ("//x", "x")])
def test_keys_are_normalised_as_jaxlib_does(given: str, expected: str) -> None:
    """Leading, trailing and doubled slashes go; the empty key is legal."""
    assert normalise(given) == expected


def test_a_get_waits_for_its_key() -> None:
    """All who wait get the value as soon as it is set; a time limit names the key."""
    driver = Driver()
    waiting, late = [driver.get("a/b", task_id) for task_id in range(3)], driver.get("never", timeout_s=2)
    driver.set("/a//b", b"1")
    assert [driver.answers[call] for call in waiting] == [(("a/b", b"1"), None)] * 3
    driver.wait(3, beating=(0, 1, 2, 3))
    assert driver.message(late) == "key 'never' was not set within 2.0 s"


def test_a_get_that_only_a_lost_process_could_end_fails_at_once() -> None:
    """`needs` names who would have to set the key."""
    driver = Driver(2)
    waiting, other = driver.get("from/1", depends_on=(1,)), driver.get("from/0", depends_on=(0,))
    driver.wait(12, beating=(0,))
    assert driver.code(waiting) is Code.UNAVAILABLE and driver.code(other) is None
    assert driver.message(waiting) == "key 'from/1' will not be set: process 1 (host b1, silent for 11 s) is lost"


def test_directories_counters_and_deletes() -> None:
    """Directories list by prefix with a slash, in order; a delete takes what is below; a counter begins at 0."""
    driver = Driver()
    for key in ("d/b", "d/a", "d", "dx", "d/c/e"):
        driver.set(key, key.encode())
    call = driver.call()
    driver.machine.keys.list_dir(call, "/d/")
    assert [key for key, _ in driver.settle()[call][0]] == ["d/a", "d/b", "d/c/e"]
    driver.machine.keys.delete(driver.call(), "d")
    driver.settle()
    assert sorted(driver.machine.keys.values) == ["dx"] and driver.machine.keys.total_bytes == 4
    for by, expected in ((3, b"3"), (-5, b"-2")):
        call = driver.call()
        driver.machine.keys.increment(call, "n", by)
        assert driver.settle()[call] == (("n", expected), None)
    call = driver.call()
    driver.machine.keys.increment(call, "dx", 1)
    assert driver.settle()[call][1].code is Code.FAILED_PRECONDITION  # type: ignore[union-attr]


def test_keys_have_bounds() -> None:
    """PreviousInstance a bound a set is RESOURCE_EXHAUSTED, says what was expected, and changes nothing."""
    driver = Driver(limits=Limits(key_bytes=10, value_bytes=100, total_bytes=250, keys=4))
    assert driver.code(driver.set("k" * 11, b"")) is Code.RESOURCE_EXHAUSTED
    assert driver.message(driver.set("k", b"x" * 101)) == "key 'k': a value of 101 bytes; expected at most 100"
    assert [driver.code(driver.set(f"k{i}", b"x" * 100)) for i in range(3)] == [Code.OK, Code.OK, Code.RESOURCE_EXHAUSTED]
    assert driver.code(driver.set("k0", b"", overwrite=True)) is Code.OK
    assert [driver.code(driver.set(f"s{i}", b"")) for i in range(3)] == [Code.OK, Code.OK, Code.RESOURCE_EXHAUSTED]
    assert driver.code(driver.set("k0", b"y")) is Code.ALREADY_EXISTS


# ---- Rows --------------------------------------------------------------------------------------------------------------------------


def test_a_machine_comes_back_from_its_rows() -> None:
    """Keys, tasks, a barrier half full and a barrier's result survive; who had come need only ask again."""
    driver = Driver(3, recoverable=True)
    driver.set("a", b"\x00\xff")
    driver.set("gone", b"1")
    driver.machine.keys.delete(driver.call(), "gone")
    for task_id in range(3):
        driver.barrier(task_id, "done")
    driver.barrier(0, "half", timeout_s=60)
    rows = journal_codec.drain(driver.machine, 1000.0)
    assert journal_codec.drain(driver.machine, 1000.0) == []
    driver.machine = Machine(driver.config, 50.0)
    driver.now = 50.0
    journal_codec.load(driver.machine, [row for row in rows if row.value is not None], 50.0, 950.0)
    assert driver.machine.keys.values == {"a": b"\x00\xff"}
    assert driver.answers[driver.barrier(1, "done")] == (0, None)
    calls = [driver.barrier(task_id, "half") for task_id in (1, 2, 0)]
    assert [driver.answers[call] for call in calls] == [(0, None)] * 3
    assert driver.machine.task_table.tasks[1].host == "b1" and driver.machine.registration.gathered
