"""Who shares a machine and a cgroup, as all processes of a group find out together."""

from __future__ import annotations

import threading
import zlib
from functools import partial

import pytest

from holdfast.checkpoint.agreement import host_sharing
from holdfast.checkpoint.agreement.host_sharing import (
    HostPlace,
    SharerCounts,
    find_sharers,
)
from holdfast.checkpoint.memory.budget import Sharers
from holdfast.checkpoint.memory.host import cgroup_numbers
from holdfast.multihost import Group, ProcessSpec
from holdfast.multihost.group.group import Solo
from tests.support.checkpointing import at_once, groups


class Lonely(Solo):
    """One of eight, of whom no other is there."""

    count = 8

    def gather(self, name: str, value: bytes, *, timeout_s: float) -> list[bytes] | None:
        raise AssertionError(name)


def test_two_containers_of_one_machine_share_the_machine_alone() -> None:
    """Numbers of cgroups count within a machine: another's may be the same."""
    places = [
        HostPlace("a", (7, 1)),
        HostPlace("a", (7, 1)),
        HostPlace("a", (8, 1)),
        HostPlace("b", (7, 1)),
        HostPlace("a", ()),
    ]
    assert SharerCounts.of(places).by_rank == ((4, 2, 3), (4, 2, 3), (4, 1, 3), (1, 1, 1), (4,))


def test_processes_of_one_cgroup_find_each_other() -> None:
    """Without a launcher that says it: all share what this process sees."""
    with groups(3) as members:
        found = at_once([partial(find_sharers, group, "hosts", 20, asks=True) for group in members])
    assert found == [Sharers(3, dict.fromkeys(cgroup_numbers(), 3), is_whole_job=True)] * 3


def test_who_is_in_another_cgroup_sees_other_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two processes of one machine each then sees what the other does not."""
    own = threading.local()
    monkeypatch.setattr(host_sharing, "cgroup_numbers", lambda: {"/": 1, **own.numbers})

    def find(group: Group) -> Sharers:
        own.numbers = {"/pod": 7} if group.index else {}
        return find_sharers(group, "hosts", 20, asks=True)

    with groups(2) as members:
        found = at_once([partial(find, group) for group in members])
    assert found == [Sharers(2, {"/": 2}), Sharers(2, {"/": 2, "/pod": 1})]


def test_what_the_launcher_says_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group whose other processes are not here would wait for them."""
    spec = ProcessSpec(
        process_id=0, num_processes=8, coordinator="h:1", local_rank=0, local_count=4
    )
    monkeypatch.setattr(host_sharing, "current_spec", lambda: spec)
    group = Lonely()
    assert find_sharers(group, "hosts", 0.1, asks=False) == Sharers(4)
    monkeypatch.setattr(host_sharing, "current_spec", lambda: None)
    # The primary's launcher says it, and this process's does not: all may be here.
    assert find_sharers(group, "hosts", 0.1, asks=False) == Sharers(8)


def test_what_thousands_are_told_is_small() -> None:
    """Rows are alike, and compress."""
    places = [HostPlace(f"{rank // 8}", (rank // 8, 5, 1)) for rank in range(4096)]
    told = SharerCounts.of(places).to_bytes()
    assert len(told) < 1000
    assert SharerCounts.from_bytes(told).by_rank[4095] == (8, 8, 8, 8)
    assert zlib.decompress(told)
