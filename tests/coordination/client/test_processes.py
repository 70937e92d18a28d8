"""The watch of processes: complete lists, in order, at every change, to every listener."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.coordination.client import processes
from holdfast.coordination.client.processes import (
    ProcessInfo,
    ProcessWatch,
    process_info,
)
from holdfast.proto import coordination_pb2 as pb
from holdfast.proto import session_pb2 as spb

STATES = ["UNINITIALIZED", "DISCONNECTED", "CONNECTED", "ERROR"]


def task(task_id: int, state: str = "CONNECTED", incarnation: int = 1) -> spb.Task:
    info = pb.TaskInfo(task_id=task_id, state=pb.TaskState.Value(state), incarnation=incarnation)
    return spb.Task(info=info, host=f"h{task_id}", pid=100 + task_id)


def test_a_process_is_as_the_wire_says() -> None:
    """State by name, the error's code by name; alive is CONNECTED alone."""
    info = pb.TaskInfo(
        task_id=3, state=pb.TaskState.ERROR, incarnation=9, error_code=10, error_message="boom"
    )
    assert process_info(info, "h", 7) == ProcessInfo(3, "ERROR", 9, "ABORTED", "boom", "h", 7)
    assert [ProcessInfo(0, state, 1).alive for state in STATES] == [False, False, True, False]


def test_listeners_see_complete_lists() -> None:
    """A full delta, then one of a single task: each listener gets all processes, sorted; a late one
    gets the present list at once.
    """
    watch = ProcessWatch()
    seen = list[Sequence[ProcessInfo]]()
    late = list[Sequence[ProcessInfo]]()
    watch.add(seen.append)
    assert seen == []  # nothing is known yet
    watch.apply([task(1), task(0)])
    watch.add(late.append)
    watch.apply([task(1, "ERROR")])
    assert [[(each.process_id, each.state) for each in processes] for processes in seen] == [
        [(0, "CONNECTED"), (1, "CONNECTED")],
        [(0, "CONNECTED"), (1, "ERROR")],
    ]
    assert late == seen and seen[0][0].host == "h0" and seen[0][0].pid == 100


def test_no_change_is_no_event() -> None:
    """The same list again notifies nobody."""
    watch = ProcessWatch()
    seen = list[Sequence[ProcessInfo]]()
    watch.add(seen.append)
    for _ in range(3):
        watch.apply([task(0)])
    assert len(seen) == 1


def test_a_listener_that_is_removed_hears_no_more() -> None:
    """To remove it again does nothing."""
    watch = ProcessWatch()
    seen = list[Sequence[ProcessInfo]]()
    remove = watch.add(seen.append)
    remove()
    remove()
    watch.apply([task(0)])
    assert seen == []


def test_a_listener_that_raises_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and the next one is notified."""
    watch = ProcessWatch()
    seen = list[Sequence[ProcessInfo]]()

    def fail(processes: Sequence[ProcessInfo]) -> None:
        raise RuntimeError("on purpose")

    watch.add(fail)
    watch.add(seen.append)
    with caplog.at_level(logging.ERROR):
        watch.apply([task(0)])
    assert len(seen) == 1 and "a listener of process changes failed" in caplog.text


def test_hosts_are_added_from_the_watch() -> None:
    """Profile A's list names no hosts; those that a Session told are filled in, others stay
    empty.
    """
    watch = ProcessWatch()
    watch.apply([task(0)])
    known, unknown = watch.with_hosts([task(0).info, task(1).info])
    assert (known.host, known.pid) == ("h0", 100) and (unknown.host, unknown.pid) == ("", 0)


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.integers(0, 3), st.sampled_from(STATES)), max_size=20))
def test_deltas_add_up(deltas: list[dict[int, str]]) -> None:
    """After any deltas the last list is what a dictionary holds; listeners are notified of changes
    only.
    """
    watch = ProcessWatch()
    seen = list[Sequence[ProcessInfo]]()
    table = dict[int, str]()
    watch.add(seen.append)
    for states in deltas:
        before = dict(table)
        table |= states
        count = len(seen)
        watch.apply([task(task_id, state) for task_id, state in states.items()])
        assert len(seen) - count == (table != before)
    if seen:
        assert {each.process_id: each.state for each in seen[-1]} == table
        assert [each.process_id for each in seen[-1]] == sorted(table)


def test_while_nobody_wants_them_processes_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """While 1,000 join, each hears 1,000 times of more. Each process is read once, by whoever asks
    at the end; before, each change was work on all.
    """
    read = 0

    def counted(*arguments: Any) -> ProcessInfo:
        nonlocal read
        read += 1
        return process_info(*arguments)

    monkeypatch.setattr(processes, "process_info", counted)
    watch = ProcessWatch()
    for number in range(1_000):
        watch.apply([task(number)])
    assert read == 0
    seen = list[Sequence[ProcessInfo]]()
    watch.add(seen.append)
    assert read == 1_000 and len(seen[-1]) == 1_000
