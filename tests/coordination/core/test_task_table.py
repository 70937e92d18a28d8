"""The task table: states, losses, versions, agents and owners of all tasks of a job."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.coordination.core.events import EventLog
from holdfast.coordination.core.status import Changes, Code, Missing, Status
from holdfast.coordination.core.task_table import TaskState, TaskTable


def table_of(count: int, changes: Changes | None = None) -> TaskTable:
    changes = Changes() if changes is None else changes
    return TaskTable(count, EventLog(1, Changes()), changes)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(TaskState)), max_size=40))
def test_counts_agree_with_the_states(moves: list[tuple[int, TaskState]]) -> None:
    """After any moves, the count of connected tasks and the set of lost ones are those of the
    states; each move is a newer version.
    """
    changes = Changes()
    table = table_of(4, changes)
    for number, (task_id, state) in enumerate(moves):
        table.move(table.tasks[task_id], state, float(number))
        assert table.tasks[task_id].version == table.version == number + 1
        assert table.tasks[task_id].state_since == number
        assert table.connected_count == sum(
            task.state is TaskState.CONNECTED for task in table.tasks
        )
        assert all(
            table.connected(task.task_id) == (task.state is TaskState.CONNECTED)
            for task in table.tasks
        )
        assert not any(
            task.state is TaskState.CONNECTED and task.task_id in table.lost for task in table.tasks
        )
        assert {
            t.task_id for t in table.tasks if t.state in (TaskState.DISCONNECTED, TaskState.ERROR)
        } <= table.lost
    moved = {task_id for task_id, _ in moves}
    assert {key for _, key in changes} == moved == {task.task_id for task in table.changed_since(0)}


def test_a_number_that_the_job_has_not() -> None:
    """It is no task, is not connected, and the error says which there are."""
    table = table_of(2)
    assert table.get(2) is None and table.get(-1) is None and not table.connected(2)
    assert table.no_such_task(2) == Status(
        Code.INVALID_ARGUMENT, "there is no process 2: the job has 2, 0 to 1"
    )


def test_an_agent_is_found_by_its_incarnation() -> None:
    """A newer agent takes the older one's place; 0 is none."""
    table = table_of(2)
    for incarnation in (5, 6, 0):
        table.set_agent(table.tasks[1], incarnation)
        assert table.by_agent == ({incarnation: 1} if incarnation else {})


def test_owners_are_counted() -> None:
    """Each owner has as many tasks as it was given; one without tasks is forgotten."""
    table = table_of(3)
    for task_id, owner in ((0, "a"), (1, "a"), (0, "b"), (1, "b")):
        table.set_owner(table.tasks[task_id], owner)
    assert table.owned == {"": 1, "b": 2} and "a" not in table.owned


def test_the_missing_are_described_in_order() -> None:
    """By number, with host, seconds of silence, and whether they are lost."""
    table = table_of(3)
    table.tasks[2].host = "h"
    table.tasks[2].last_seen = 4.0
    table.move(table.tasks[2], TaskState.ERROR, 4.0)
    assert table.missing([2, 0], 9.0) == (Missing(0, "", None, False), Missing(2, "h", 5.0, True))
