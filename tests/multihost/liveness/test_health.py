"""Health: what it makes of the lists that a client pushes."""

from __future__ import annotations

import threading

import grpc
import pytest

from holdfast.coordination import ProcessLost
from holdfast.coordination.client.processes import ProcessInfo as TaskInfo
from holdfast.coordination.client.processes import ProcessWatch
from holdfast.multihost import Health, ProcessHealth
from holdfast.multihost.group.group_client import GroupClient
from holdfast.proto import coordination_pb2, session_pb2


class PushedClient:
    """A client that pushes the lists a test gives it, through the client's own ProcessWatch."""

    def __init__(self) -> None:
        self.watch = ProcessWatch()
        self.watch_processes = self.watch.add

    def push(self, *tasks: TaskInfo) -> None:
        self.watch.apply([_on_the_wire(task) for task in tasks])


def _on_the_wire(process: TaskInfo) -> session_pb2.Task:
    info = coordination_pb2.TaskInfo(
        task_id=process.process_id,
        state=coordination_pb2.TaskState.Value(process.state),
        incarnation=process.incarnation,
        error_code=grpc.StatusCode[process.code].value[0],
        error_message=process.message,
    )
    return session_pb2.Task(info=info, host=process.host, pid=process.pid)


def kept(group_client: GroupClient) -> Health:
    """Returns the health of a client's processes, which refuses ended lives."""
    return group_client.peers.keep_lives()


class Listener:
    """Keeps the lists that it gets."""

    def __init__(self) -> None:
        self.lists: list[list[ProcessHealth]] = []

    def update_global_process_info(self, infos: list[ProcessHealth]) -> None:
        self.lists.append(list(infos))


def test_which_lives_ended_between_two_lists() -> None:
    """Connected before, and now gone, not connected or another: failed. Not yet connected before:
    not.
    """
    client = PushedClient()
    health = kept(GroupClient(client))  # type: ignore[arg-type]
    connected = [TaskInfo(n, "CONNECTED", 10 + n) for n in range(4)]
    client.push(*connected, TaskInfo(4, "UNINITIALIZED", 0))
    assert health.failed() == {}
    client.push(
        TaskInfo(0, "CONNECTED", 10, host="told later"),
        TaskInfo(1, "ERROR", 11, "ABORTED", "killed"),
        TaskInfo(2, "CONNECTED", 99),
        TaskInfo(3, "DISCONNECTED", 13),
        TaskInfo(4, "ERROR", 0),
    )
    assert {n: (life.incarnation, life.error) for n, life in health.failed().items()} == {
        1: (11, "killed"),
        2: (12, "it was started again"),
        3: (13, "it has left the job"),
    }


def test_a_failed_process_is_refused_until_admitted() -> None:
    """After a death, work with the process is refused with its number, host and reason, also when
    it is back; `admit` ends that.
    """
    client = PushedClient()
    health = kept(GroupClient(client, tasks=[1, 0]))  # type: ignore[arg-type]
    client.push(TaskInfo(0, "CONNECTED", 7, host="a"), TaskInfo(1, "CONNECTED", 8, host="b"))
    health.require([0, 1], "save")
    client.push(
        TaskInfo(0, "ERROR", 7, "UNAVAILABLE", "silent for 12 s", "a"),
        TaskInfo(1, "CONNECTED", 8, host="b"),
    )
    health.require([0], "save")
    with pytest.raises(ProcessLost) as lost:
        health.require([0, 1], "save")
    assert (
        str(lost.value)
        == "UNAVAILABLE: 'save' needs process 1 (host a), which is gone: silent for 12 s"
    )
    assert (lost.value.process, lost.value.host) == (1, "a")
    client.push(TaskInfo(0, "CONNECTED", 9, host="a"), TaskInfo(1, "CONNECTED", 8, host="b"))
    with pytest.raises(ProcessLost, match="silent for 12 s"):
        health.require([1], "save")
    health.admit({0: 8, 1: 9})
    health.require([0, 1], "save")
    assert health.statistics() == {"version": 3, "listeners": 0, "failed": []}


@pytest.mark.parametrize("lists", ["both ends", "the last"])
def test_an_admitted_life_stays_admitted(lists: str) -> None:
    """The lists in which the former life ends may come after `live_processes()` has shown the next
    one. When that one ends in its turn, work with it is refused.
    """
    client = PushedClient()
    health = kept(GroupClient(client))  # type: ignore[arg-type]
    client.push(TaskInfo(0, "CONNECTED", 7), TaskInfo(1, "CONNECTED", 8))
    health.admit({0: 7, 1: 9})
    if lists == "both ends":
        client.push(TaskInfo(0, "CONNECTED", 7), TaskInfo(1, "ERROR", 8))
        health.require([1], "save")
    client.push(TaskInfo(0, "CONNECTED", 7), TaskInfo(1, "CONNECTED", 9))
    health.require([1], "save")
    client.push(TaskInfo(0, "CONNECTED", 7), TaskInfo(1, "CONNECTED", 10))
    with pytest.raises(ProcessLost, match="it was started again"):
        health.require([1], "save")


def test_a_life_after_an_admitted_one_is_refused() -> None:
    """Where the list that shows it shows the ends of both lives before it."""
    client = PushedClient()
    health = kept(GroupClient(client))  # type: ignore[arg-type]
    client.push(TaskInfo(0, "CONNECTED", 7), TaskInfo(1, "CONNECTED", 8))
    health.admit({0: 7, 1: 9})
    client.push(TaskInfo(0, "CONNECTED", 7), TaskInfo(1, "CONNECTED", 10))
    with pytest.raises(ProcessLost, match="it was started again"):
        health.require([1], "save")


def test_listeners_get_complete_lists_in_order() -> None:
    """A listener gets the list at once and at each change, until it is removed; one that raises
    does not stop the others.
    """
    client = PushedClient()
    first = Listener()
    second = Listener()
    health = kept(GroupClient(client, tasks=[1, 0]))  # type: ignore[arg-type]
    client.push(TaskInfo(0, "CONNECTED", 7), TaskInfo(1, "UNINITIALIZED", 0))
    remove = health.add_listener(first)
    health.add_listener(second)
    client.push(TaskInfo(0, "CONNECTED", 7), TaskInfo(1, "CONNECTED", 8))
    remove()
    client.push(TaskInfo(0, "DISCONNECTED", 7), TaskInfo(1, "CONNECTED", 8))
    assert [[info.state for info in infos] for infos in first.lists] == [
        ["UNINITIALIZED", "CONNECTED"],
        ["CONNECTED", "CONNECTED"],
    ]
    assert second.lists[:2] == first.lists
    assert second.lists[2] == [
        ProcessHealth(0, "CONNECTED", 8),
        ProcessHealth(1, "DISCONNECTED", 7, "it has left the job"),
    ]


def test_who_waits_finds_the_change() -> None:
    """Also where the list itself shows no loss, because the process is back: the last call to a
    waiter comes after the health knows.
    """
    client = PushedClient()
    group_client = GroupClient(client)  # type: ignore[arg-type]
    seen: list[list[int]] = []
    with group_client.peers.on_change(lambda: seen.append(sorted(health.failed()))):
        health = kept(group_client)
        client.push(TaskInfo(0, "CONNECTED", 7), TaskInfo(1, "CONNECTED", 8))
        client.push(TaskInfo(0, "CONNECTED", 7), TaskInfo(1, "CONNECTED", 9))
    assert seen[-1] == [1] and list(group_client.lost_tasks()) == []
    with pytest.raises(ProcessLost, match="it was started again"):
        group_client.raise_if_lost([0, 1], "a computation")


def test_a_health_without_a_telling_client_knows_nothing() -> None:
    """Over jaxlib's own client the list is empty and nothing is refused."""
    health = kept(GroupClient(threading))  # type: ignore[arg-type]  # any object without watch_processes
    assert health.processes() == [] and health.failed() == {}
    health.require([0, 1], "anything")
    health.close()


class Numbers(list[int]):
    """Task ids that are not to be searched through."""

    def index(self, *arguments: object) -> int:
        raise AssertionError("a search for each of thousands of processes")


def test_a_change_is_the_work_of_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,000 processes one is lost: its entry alone is made anew, and no number is searched."""
    client = PushedClient()
    health = kept(GroupClient(client, tasks=Numbers(reversed(range(1_000)))))  # type: ignore[arg-type]
    client.push(*(TaskInfo(task, "CONNECTED", task + 1) for task in range(1_000)))
    before = health.processes()
    client.push(
        *(TaskInfo(task, "ERROR" if task == 7 else "CONNECTED", task + 1) for task in range(1_000))
    )
    after = health.processes()
    made = [new for old, new in zip(before, after, strict=True) if old is not new]
    assert [info.process_id for info in made] == [992] and list(health.failed()) == [992]
