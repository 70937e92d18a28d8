"""The history of a job: what is noted, bounded, in order, and what survives the coordinator."""

from __future__ import annotations

from holdfast.coordination.core import journal_codec
from holdfast.coordination.core.events import EventLog
from holdfast.coordination.core.machine import Machine
from holdfast.coordination.core.status import EVENT, Changes
from holdfast.coordination.limits import Limits
from tests.support.driver import Driver


def test_the_oldest_are_forgotten_and_numbers_go_on() -> None:
    """A reader asks for what is above the last number that it has seen."""
    log = EventLog(3, Changes())
    for second in range(5):
        log.note("saved", f"step {second} is saved", float(second))
    assert [(event.number, event.text) for event in log.after(0)] == [
        (n, f"step {n - 1} is saved") for n in (3, 4, 5)
    ]
    assert [event.number for event in log.after(4)] == [5] and log.after(5) == []


def test_thousands_that_join_together_are_one_event() -> None:
    """Its number is new each time, so that readers see it; one that comes later is an event of its
    own.
    """
    log = EventLog(10, Changes())
    for process in range(4096):
        log.note("joined", f"process {process} joined", process / 10_000, process)
    log.note("joined", "process 7 joined", 60.0, 7)
    assert [event.text for event in log.after(0)] == ["4096 processes joined", "process 7 joined"]
    assert [event.number for event in log.after(0)] == [4096, 4097]


def test_a_life_is_told_from_beginning_to_end() -> None:
    """Who joined, what was restored and saved (once for all), what went wrong, a barrier that timed
    out, and who was lost and why.
    """
    driver = Driver(2, recoverable=True)
    for task_id in range(2):
        driver.report(task_id, values={"restored_step": 20.0})
    for task_id in range(2):
        driver.report(task_id, saved_step=30)
    driver.report(1, trouble="step 40 was not saved: full")
    driver.barrier(0, "save", timeout_s=5)
    driver.wait(6, beating=(0, 1))
    driver.wait(12, beating=(0,))
    kinds = [event.kind for event in driver.machine.events.after(0)]
    texts = [event.text for event in driver.machine.events.after(0)]
    assert kinds == ["joined", "restored", "saved", "trouble", "barrier", "lost"], texts
    assert texts[:4] == [
        "2 processes joined",
        "step 20 is restored",
        "step 30 is saved",
        "process 1: step 40 was not saved: full",
    ]
    assert "'save'" in texts[4] or "Id: save::" in texts[4]
    assert texts[5] == "process 1 (host b1, silent for 11 s) is lost: its heartbeat timeout is 10 s"


def test_history_survives_the_coordinator() -> None:
    """Rows hold what is kept and no more; times stay the times of the wall."""
    driver = Driver(1, limits=Limits(events=2))
    rows: dict[tuple[str, str], bytes] = {}
    for step in range(4):
        driver.report(saved_step=step)
        for row in journal_codec.drain(driver.machine, 1000.0):
            if row.value is None:
                rows.pop((row.table, row.key), None)
            else:
                rows[row.table, row.key] = row.value
    noted = driver.machine.events.after(0)
    machine = Machine(driver.config, 0.0)
    journal_codec.load(
        machine, [journal_codec.Row(*key, value) for key, value in rows.items()], 0.0, 1005.0
    )
    assert [(event.number, event.text, event.at) for event in machine.events.after(0)] == [
        (event.number, event.text, event.at - 5.0) for event in noted
    ]
    assert sum(table == EVENT for table, _ in rows) == 2
    machine.events.note("saved", "step 9 is saved", 1.0)
    assert machine.events.after(noted[-1].number)[0].text == "step 9 is saved"
