"""The barrier of the living: all members that are connected ask, and get the same answer."""

from __future__ import annotations

import pytest

from holdfast.coordination.core import journal_codec
from holdfast.coordination.core.calls import Call
from holdfast.coordination.core.machine import Machine
from holdfast.coordination.core.status import ALIVE, Code
from holdfast.coordination.limits import Limits
from tests.support.driver import Driver


def alive(driver: Driver, call: Call) -> list[int]:
    return [each.task_id for each in driver.value(call)]


def ask(
    driver: Driver, task_id: int, members: list[int], timeout_s: float = 60, number: int = 0
) -> Call:
    return driver.make(
        lambda call: driver.machine.liveness.arrive(call, frozenset(members)),
        task_id,
        timeout_s,
        number=number,
    )


def test_alive_answers_when_every_living_member_has_asked() -> None:
    """The dead are not waited for, and are not in the answer; a caller outside the set is
    INVALID_ARGUMENT.
    """
    driver = Driver(3, recoverable=True)
    calls = [ask(driver, task_id, [0, 1, 2, 99]) for task_id in range(2)]
    assert not driver.answers.keys() & set(calls)
    driver.wait(12, beating=(0, 1))
    assert [alive(driver, call) for call in calls] == [[0, 1], [0, 1]]
    assert driver.code(ask(driver, 0, [1, 2])) is Code.INVALID_ARGUMENT


def test_sets_are_apart() -> None:
    """Calls with another set of members do not count; the order of the numbers does not matter."""
    driver = Driver(3)
    pair = ask(driver, 0, [0, 1])
    all_three = ask(driver, 2, [0, 1, 2])
    assert driver.code(pair) is None
    other = ask(driver, 1, [1, 0])
    assert alive(driver, pair) == alive(driver, other) == [0, 1]
    assert driver.code(all_three) is None


def test_a_timeout_names_who_has_not_asked() -> None:
    """Each caller has its own time; those who are left still get an answer."""
    driver = Driver(3)
    late = ask(driver, 0, [0, 1, 2], 2)
    patient = ask(driver, 1, [0, 1, 2])
    driver.wait(3, beating=(0, 1, 2))
    assert driver.code(late) is Code.DEADLINE_EXCEEDED and driver.code(patient) is None
    assert (
        driver.message(late)
        == "2 of 3 asked who is alive, missing process 2 (host b2, silent for 0.0 s); waited 2.0 s"
    )
    ask(driver, 2, [0, 1, 2])
    again = ask(driver, 0, [0, 1, 2])
    assert alive(driver, patient) == alive(driver, again) == [0, 1, 2]


def test_a_newer_call_takes_the_olders_place() -> None:
    """The older one is CANCELLED."""
    driver = Driver(2)
    older = ask(driver, 0, [0, 1])
    newer = ask(driver, 0, [0, 1])
    assert driver.code(older) is Code.CANCELLED and driver.code(newer) is None


@pytest.mark.parametrize("lost_first", [False, True])
def test_the_last_one_waited_for_may_be_lost(lost_first: bool) -> None:
    """Its loss answers the others, whether it is known before they ask or after."""
    driver = Driver(2, recoverable=True)
    if lost_first:
        driver.wait(12, beating=(0,))
    call = ask(driver, 0, [0, 1])
    if not lost_first:
        assert driver.code(call) is None
        driver.wait(12, beating=(0,))
    assert alive(driver, call) == [0]


def test_a_dropped_call_is_waited_for_again() -> None:
    """Nothing of it is left, so a set whose only caller has gone is forgotten."""
    driver = Driver(2)
    gone = ask(driver, 0, [0, 1])
    gone.drop()
    waiting = ask(driver, 1, [0, 1])
    assert driver.code(waiting) is None
    driver.wait(61, beating=(0, 1))
    assert driver.code(waiting) is Code.DEADLINE_EXCEEDED and driver.code(gone) is None


def test_a_call_sent_again_gets_its_answer() -> None:
    """A caller whose answer was lost is not counted for the next question of the others, whatever
    has happened since. Its next call, and those of its next life, are.
    """
    driver = Driver(3, recoverable=True)
    for task_id in (0, 1, 2):
        ask(driver, task_id, [0, 1, 2], number=5)
    driver.wait(12, beating=(0, 1))
    assert alive(driver, ask(driver, 1, [2, 1, 0], number=5)) == [0, 1, 2]
    following = ask(driver, 0, [0, 1, 2], number=6)
    assert alive(driver, ask(driver, 1, [0, 1, 2], number=5)) == [0, 1, 2]
    assert driver.code(following) is None
    assert alive(driver, ask(driver, 1, [0, 1, 2], number=6)) == [0, 1]
    assert alive(driver, following) == [0, 1]
    assert driver.open(1, life=2) is None
    other_life = ask(driver, 1, [0, 1, 2], number=6)
    assert driver.code(other_life) is None
    assert alive(driver, ask(driver, 0, [0, 1, 2], number=7)) == [0, 1]
    assert alive(driver, other_life) == [0, 1]


def test_an_answer_outlives_the_service() -> None:
    """A service that was killed after some were answered, and is back with its journal, gives the
    others the same answer. An answer that another has followed is gone.
    """
    driver = Driver(2, recoverable=True)
    rows: dict[tuple[str, str], bytes] = {}
    for number in (1, 2):
        for task_id in (0, 1):
            ask(driver, task_id, [0, 1], number=number)
        for row in journal_codec.drain(driver.machine, 0.0):
            rows.pop((row.table, row.key), None)
            if row.value is not None:
                rows[row.table, row.key] = row.value
    assert [key for table, key in rows if table == ALIVE] == ["2"]
    driver.machine = Machine(driver.config, driver.now)
    journal_codec.load(
        driver.machine, [journal_codec.Row(*key, value) for key, value in rows.items()], 0.0, 0.0
    )
    assert journal_codec.drain(driver.machine, 0.0) == []
    next_call = ask(driver, 0, [0, 1], number=3)
    assert alive(driver, ask(driver, 1, [0, 1], number=2)) == [0, 1]
    assert driver.code(next_call) is None


def test_kept_answers_are_bounded() -> None:
    """Those of the sets asked about longest ago go first."""
    driver = Driver(4, limits=Limits(alive_members=4))
    for members in ([0, 1], [1, 2], [2, 3]):
        for task_id in members:
            ask(driver, task_id, members, number=1)
    assert driver.code(ask(driver, 0, [0, 1], number=1)) is None
    assert alive(driver, ask(driver, 1, [1, 2], number=1)) == [1, 2]
