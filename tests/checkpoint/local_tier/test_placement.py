"""Where copies go: other hosts, other slices, and as many as were asked for."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.local_tier.placement import Member, group_hosts, place_copies


def _members(slices: int, hosts: int, processes: int) -> list[Member]:
    """Returns the processes of a job of equal slices, in order of slices and hosts."""
    places = itertools.product(range(slices), range(hosts), range(processes))
    return [Member(f"{part}/{host}", part) for part, host, _ in places]


SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 3), st.integers(0, 3))


@given(SHAPES)
@settings(deadline=None)
def test_each_part_has_its_copies_on_other_hosts(shape: tuple[int, int, int, int]) -> None:
    """Each rank has `replicas` keepers on as many hosts, none of them its own, fewer only where the
    job has too few hosts.
    """
    *job, replicas = shape
    members = _members(*job)
    copies = place_copies(members, replicas)
    for rank, member in enumerate(members):
        hosts = [members[keeper].host for keeper in copies[rank]]
        assert len(set(hosts)) == len(hosts) == min(replicas, job[0] * job[1] - 1)
        assert member.host not in hosts


@given(SHAPES)
@settings(deadline=None)
def test_any_replicas_hosts_of_each_group_may_die(shape: tuple[int, int, int, int]) -> None:
    """Whichever `replicas` hosts of every group are lost together, a copy of every part is left;
    groups share no host.
    """
    *job, replicas = shape
    members = _members(*job)
    copies = place_copies(members, replicas)
    groups = group_hosts(members, replicas)
    assert sorted(host for group in groups for host in group) == sorted(
        {member.host for member in members}
    )
    for group in groups:
        owners = [rank for rank, member in enumerate(members) if member.host in group]
        for lost in itertools.combinations(group, min(replicas, len(group) - 1)):
            assert all(
                {members[rank].host for rank in [owner, *copies[owner]]} - {*lost}
                for owner in owners
            )


@given(SHAPES)
@settings(deadline=None)
def test_a_whole_slice_may_die(shape: tuple[int, int, int, int]) -> None:
    """Where there are several slices and a replica, no part has all its copies in one."""
    *job, replicas = shape
    members = _members(*job)
    if job[0] == 1 or replicas == 0:
        return
    for rank, keepers in enumerate(place_copies(members, replicas)):
        assert len({members[each].slice_id for each in [rank, *keepers]}) > 1


def test_neighbours_of_one_slice_keep_no_copies_for_each_other() -> None:
    """Hosts of one slice that follow each other share a switch: copies go half a slice away."""
    assert place_copies(_members(1, 8, 1), 1) == [[4], [5], [6], [7], [0], [1], [2], [3]]
    assert group_hosts(_members(1, 5, 1), 1) == [["0/0", "0/2"], ["0/1", "0/3", "0/4"]]


def test_ranks_of_one_host_divide_its_copies() -> None:
    """Each keeps the copy of one rank of another host."""
    assert place_copies(_members(1, 2, 2), 1) == [[2], [3], [0], [1]]


def test_a_host_alone_keeps_what_it_has() -> None:
    """One host, or no replicas: no copies, and one group for each host that needs none."""
    assert place_copies(_members(1, 1, 2), 1) == [[], []]
    assert group_hosts(_members(1, 3, 1), 0) == [["0/0"], ["0/1"], ["0/2"]]
