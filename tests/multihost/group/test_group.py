"""Solo, and ClusterGroup: what every client has to hold up for it, in one suite that clients of a
service and those of tests' jobs in memory run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import pytest

from holdfast.coordination import BarrierTimeout
from holdfast.multihost import ClusterGroup, Group, Solo
from holdfast.multihost.group.group_client import group_client_of
from tests.support.checkpointing import at_once, groups, served_groups

T = TypeVar("T")
COUNT = 3


class Job(NamedTuple):
    """The groups of all processes, and their clients."""

    groups: Sequence[ClusterGroup]
    clients: Sequence[Any]

    def on_each(self, call: Callable[[Group], T]) -> list[T]:
        return at_once([lambda group=group: call(group) for group in self.groups])

    def keys(self) -> list[str]:
        """Returns the keys that the coordinator has."""
        return [key for key, _ in self.clients[0].key_value_dir_get_bytes("holdfast")]


@pytest.fixture(scope="module", params=[groups, served_groups])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    with request.param(COUNT) as members:
        yield Job(members, [group._group_client.client for group in members])


def test_solo_answers_without_anybody() -> None:
    """The group of one gives back what it was given."""
    solo = Solo()
    solo.barrier("b", timeout_s=1)
    solo.report(step=1)
    assert (solo.index, solo.count) == (0, 1)
    assert solo.gather("g", b"x", timeout_s=1) == [b"x"]
    assert solo.broadcast("c", b"y", timeout_s=1) == b"y"
    with pytest.raises(ValueError, match="rank 0 gives the value"):
        solo.broadcast("c", None, timeout_s=1)


def test_values_come_in_rank_order(job: Job) -> None:
    """The nth call of a name matches the nth, sizes up to 9 MiB pass, and no key stays."""

    def calls(group: Group) -> None:
        index = group.index
        assert group.count == COUNT
        for turn in range(30):
            got = group.gather("same/name", f"{index}:{turn}".encode(), timeout_s=30)
            expected = [f"{rank}:{turn}".encode() for rank in range(COUNT)]
            assert got == (None if index else expected)
            value = None if index else str(turn).encode()
            assert group.broadcast("same/name", value, timeout_s=30) == str(turn).encode()
            group.barrier("same/name", timeout_s=30)
        big = group.gather("big", bytes([index]) * (9 << 20), timeout_s=60)
        assert index or (big is not None and [len(value) for value in big] == [9 << 20] * COUNT)
        empty = group.gather("", b"", timeout_s=30)
        assert empty == (None if index else [b""] * COUNT)
        group.report(step=3)
        group.barrier("before the look", timeout_s=30)

    job.on_each(calls)
    assert job.keys() == []


def test_names_do_not_wait_for_each_other(job: Job) -> None:
    """Threads with different names overtake each other; threads with one name take turns."""
    names = [f"n{i}" for i in range(6)] * 5

    def calls(group: Group) -> list[tuple[str, list[bytes] | None]]:
        order = names if group.index % 2 else names[::-1]

        def gather(name: str) -> tuple[str, list[bytes] | None]:
            return name, group.gather(name, f"{name}.{group.index}".encode(), timeout_s=60)

        return at_once([lambda name=name: gather(name) for name in order])

    for name, values in job.on_each(calls)[0]:
        assert values == [f"{name}.{rank}".encode() for rank in range(COUNT)]


def test_a_missing_process_is_named_and_fails_late(job: Job) -> None:
    """Who waits gets BarrierTimeout with the missing process; the late one gets the same answer;
    the name works again; no key stays.
    """
    over = threading.Event()

    def calls(group: Group) -> None:
        if group.index == 1:
            over.wait(30)
        with pytest.raises(BarrierTimeout) as caught:
            group.gather("save", b"x", timeout_s=0.5)
        over.set()
        assert isinstance(caught.value, TimeoutError)
        assert str(caught.value).startswith("DEADLINE_EXCEEDED: ")
        assert caught.value.missing == (1,) and caught.value.name == "save"
        got = group.gather("save", b"y", timeout_s=30)
        assert got == (None if group.index else [b"y"] * COUNT)
        group.barrier("before the look", timeout_s=30)

    job.on_each(calls)
    assert job.keys() == []


def test_a_value_that_does_not_come(job: Job) -> None:
    """Rank 0 does not wait for the readers of its value, and they do not wait for ever for it."""
    assert job.groups[0].broadcast("sent", b"value", timeout_s=5) == b"value"
    for group in job.groups[1:]:
        assert group.broadcast("sent", None, timeout_s=5) == b"value"
    with pytest.raises(
        BarrierTimeout, match=r"'c' did not come from process 0 in 0\.2 s"
    ) as caught:
        job.groups[1].broadcast("c", None, timeout_s=0.2)
    assert caught.value.missing == (0,)
    for index, value in ((0, None), (1, b"mine")):
        with pytest.raises(ValueError, match="rank 0 gives the value and the others None"):
            job.groups[index].broadcast("c", value, timeout_s=5)
    job.groups[0].broadcast("c", b"late", timeout_s=5)
    assert job.groups[2].broadcast("c", None, timeout_s=5) == b"late"
    assert job.keys() == []


def test_a_group_of_some_processes(job: Job) -> None:
    """Ranks follow the processes given; two groups with the same names do not meet."""

    def calls(index: int) -> None:
        members = [2, 0] if index != 1 else [1]
        some = ClusterGroup(
            job.clients[index], members.index(index), len(members), processes=members
        )
        for _ in range(5):
            got = some.gather("x", b"%d" % index, timeout_s=30)
            assert got == (None if some.index else [b"%d" % member for member in members])
            value = None if some.index else b"from %d" % index
            assert some.broadcast("x", value, timeout_s=30) == b"from %d" % members[0]
            some.barrier("x", timeout_s=30)

    at_once([lambda index=index: calls(index) for index in range(COUNT)])


def test_keys_of_a_client(job: Job) -> None:
    """A key is set once unless it may be overwritten; a folder goes with all below it, and nothing
    beside it.
    """
    client = group_client_of(job.clients[0])
    client.set("holdfast/k/a", b"1")
    client.set("holdfast/k/a", b"2")
    client.set("holdfast/kk", b"3")
    with client.errors("again"), pytest.raises(Exception, match=r"^ALREADY_EXISTS"):
        job.clients[1].key_value_set_bytes("holdfast/k/a", b"4")
    assert client.list("holdfast/k") == {"a": b"2"}
    assert client.list("holdfast") == {"k/a": b"2", "kk": b"3"}
    client.delete("holdfast/k")
    assert client.list("holdfast") == {"kk": b"3"}
    client.delete("holdfast/kk")
    assert job.keys() == []
