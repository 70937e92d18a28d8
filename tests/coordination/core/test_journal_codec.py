"""The journal's rows hold all of the machine's state that outlives a crash."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.coordination.core import journal_codec
from holdfast.coordination.core.machine import Machine
from holdfast.coordination.core.status import Code
from tests.support.driver import Driver


def test_a_machine_comes_back_from_its_rows() -> None:
    """Keys, tasks, a barrier half full and a barrier's result survive; who had come need only ask
    again.
    """
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


def test_nothing_grows_without_a_journal() -> None:
    """Names of keys and barriers that are gone are not kept for a journal that is not there."""
    driver = Driver(2)
    driver.set("a", b"1")
    driver.barrier(0)
    driver.machine.changes.clear()
    assert journal_codec.drain(driver.machine, 0.0) == []


def restarted(driver: Driver, rows: dict[tuple[str, str], bytes], wall_offset_s: float) -> Machine:
    """Folds what has changed into `rows`, and returns a machine that has been loaded from them."""
    for row in journal_codec.drain(driver.machine, wall_offset_s):
        if row.value is None:
            rows.pop((row.table, row.key), None)
        else:
            rows[row.table, row.key] = row.value
    machine = Machine(driver.config, driver.now)
    journal_codec.load(
        machine,
        [journal_codec.Row(*key, value) for key, value in sorted(rows.items())],
        driver.now,
        wall_offset_s,
    )
    return machine


def state_of(machine: Machine) -> dict[str, Any]:
    """Returns what must outlive a crash; waiting calls do not."""
    tasks = [
        replace(task, last_seen=None, state_since=0.0, attached=False)
        for task in machine.task_table.tasks
    ]
    both = [*machine.barriers.open.values(), *machine.barriers.finished.values()]
    barriers = {
        b.name: (
            b.counter,
            b.participants,
            b.arrived.keys(),
            b.began,
            b.former,
            b.told,
            b.previous,
            b.outcome,
        )
        for b in both
    }
    table = machine.task_table
    return {
        "tasks": tasks,
        "table": (table.version, table.lost, table.connected_count, table.by_agent, table.owned),
        "keys": (machine.keys.values, machine.keys.total_bytes),
        "barriers": barriers,
        "job": (machine.registration.gathered, machine.polls.error),
    }


EVENTS = st.one_of(
    st.tuples(st.just("barrier"), st.integers(0, 2), st.integers(0, 2)),
    st.tuples(st.just("set"), st.integers(0, 4), st.integers(0, 255)),
    st.tuples(st.just("delete"), st.integers(0, 4), st.just(0)),
    st.tuples(st.just("register"), st.integers(0, 2), st.integers(2, 4)),
    st.tuples(st.just("restart"), st.integers(0, 2), st.integers(2, 4)),
    st.tuples(st.just("error"), st.integers(0, 2), st.integers(0, 20)),
    st.tuples(st.just("silence"), st.integers(0, 2), st.integers(1, 12)),
    st.tuples(st.just("crash"), st.just(0), st.just(0)),
)


@settings(deadline=None)
@given(st.booleans(), st.lists(EVENTS, max_size=40))
def test_whatever_happens_the_rows_hold_the_state(
    recoverable: bool, events: list[tuple[str, int, int]]
) -> None:
    """After each crash in a run of random events, the loaded machine has the same tasks, keys,
    barriers and errors.
    """
    driver = Driver(3, recoverable=recoverable)
    rows = dict[tuple[str, str], bytes]()
    for what, who, number in [*events, ("crash", 0, 0)]:
        if what == "barrier":
            driver.barrier(who, f"b{number % 2}", counter=number)
        elif what == "set":
            driver.set(f"k/{who}", bytes([number]), overwrite=True)
        elif what == "delete":
            driver.make(lambda call, who=who: driver.machine.keys.delete(call, f"k/{who}"))  # type: ignore[misc]
        elif what == "register":
            driver.register(who, 1_000 * number + who)
        elif what == "restart":
            driver.open(who, life=number)
        elif what == "error":
            driver.make(lambda call, n=number: driver.machine.report_error(call, n, "failed"), who)  # type: ignore[misc]
        elif what == "silence":
            driver.wait(number, beating=tuple({0, 1, 2} - {who}))
        else:
            loaded = restarted(driver, rows, 1e9)
            assert state_of(loaded) == state_of(driver.machine)


def test_deadlines_go_on_while_no_service_runs() -> None:
    """A barrier that had 5 s left fails 5 s of wall time later, though the machine's clock began
    anew.
    """
    driver = Driver(2, recoverable=True)
    driver.barrier(0, "b", timeout_s=5)
    rows = [row for row in journal_codec.drain(driver.machine, 1_000.0) if row.value is not None]
    driver.machine = Machine(driver.config, 50.0)
    driver.now = 50.0
    journal_codec.load(driver.machine, rows, 50.0, 953.0)  # 3 s of wall time have passed
    driver.wait(1.5, beating=(0, 1))
    assert "b" in driver.machine.barriers.open
    driver.wait(1, beating=(0, 1))
    assert driver.code(driver.barrier(1, "b")) is Code.DEADLINE_EXCEEDED


def test_an_error_that_no_task_shows_is_kept() -> None:
    """A restart that a strict job refuses is everyone's error, though no task's state has changed:
    a later poll hears of it too.
    """
    driver = Driver(2)
    rows = dict[tuple[str, str], bytes]()
    restarted(driver, rows, 0.0)
    refused = driver.open(1, life=2)
    driver.machine = restarted(driver, rows, 0.0)
    poll = driver.make(driver.machine.polls.poll)
    assert driver.answers[poll] == (None, refused)


def test_an_arrival_costs_the_journal_one_arrival() -> None:
    """Each of 200 arrivals at one barrier writes its own row alone; when the barrier is over, one
    row is left, and all survive a crash.
    """
    driver = Driver(200, recoverable=True)
    rows = dict[tuple[str, str], bytes]()
    rows |= {
        (row.table, row.key): row.value
        for row in journal_codec.drain(driver.machine, 0.0)
        if row.value is not None
    }
    sizes = []
    for task_id in range(199):
        driver.barrier(task_id, "b", timeout_s=60)
        written = journal_codec.drain(driver.machine, 0.0)
        rows |= {(row.table, row.key): row.value for row in written if row.value is not None}
        sizes.append(sum(len(row.value or b"") for row in written))
    assert max(sizes[1:]) < 100, max(sizes)
    driver.machine = restarted(driver, rows, 0.0)
    assert driver.machine.barriers.open["b"].missing() == {199}
    calls = [driver.barrier(task_id, "b", timeout_s=60) for task_id in range(200)]
    assert {driver.value(call) for call in calls} == {0}
    restarted(driver, rows, 0.0)
    assert [table for table, _ in rows].count("arrived") == 0 and len(rows["barrier", "b"]) < 400
