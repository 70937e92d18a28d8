"""Decides which processes keep copies of whose parts: a pure function of where the processes run,
alike on all of them.

The failure domain is the host: processes of one host die together, and keep no copies for each
other. Hosts are dealt into groups of `replicas` + 1, in turn from each slice, so that a group has
hosts of as many slices as there are: of slices of one size a whole one may die. What larger slices
have more of stays among itself. Where there is one slice, its hosts are cut into `replicas` + 1
stretches for that, since neighbours share a switch. Each host of a group has the copies of the
`replicas` hosts before it, counted in a ring; the hosts that are too few for a group of their own
join the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, zip_longest


@dataclass(frozen=True)
class Member:
    """Where a process runs: its failure domain (a host's boot id), and the slice of the job."""

    host: str
    slice_id: int = 0


def group_hosts(members: Sequence[Member], replicas: int) -> list[list[str]]:
    """Returns the hosts of each group, in the order of its ring; `members` are in rank order."""
    size = replicas + 1
    dealt = [
        host for row in zip_longest(*_blocks(members, size)) for host in row if host is not None
    ]
    starts = range(0, max(1, len(dealt) // size) * size, size)
    return [dealt[start:end] for start, end in pairwise([*starts, len(dealt)])]


def _blocks(members: Sequence[Member], size: int) -> list[list[str]]:
    """Returns the hosts of each slice, or of so many stretches of the only one."""
    slice_of: dict[str, int] = {}
    for member in members:
        # A host is of the slice of its first process.
        slice_of.setdefault(member.host, member.slice_id)
    hosts = sorted(slice_of, key=slice_of.__getitem__)
    blocks = [list(block) for _, block in groupby(hosts, slice_of.__getitem__)]
    if len(blocks) > 1:
        return blocks
    ends = [len(hosts) * block // size for block in range(size + 1)]
    return [hosts[first:end] for first, end in pairwise(ends)]


def place_copies(members: Sequence[Member], replicas: int) -> list[list[int]]:
    """Returns for each rank the ranks that keep a copy of its part: one on each of `replicas` other
    hosts, if there are so many. `members` are in rank order.
    """
    ranks: dict[str, list[int]] = {}
    for rank, member in enumerate(members):
        ranks.setdefault(member.host, []).append(rank)
    copies: list[list[int]] = [[] for _ in members]
    for ring in group_hosts(members, replicas):
        for at, host in enumerate(ring):
            others = [*ring[at + 1 :], *ring[:at]][:replicas]
            for place, rank in enumerate(ranks[host]):
                copies[rank] = [ranks[other][place % len(ranks[other])] for other in others]
    return copies
