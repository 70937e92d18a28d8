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
    """Where the process of a rank runs: its failure domain (a host's boot id), and the slice of the
    job.
    """

    rank: int
    host: str
    slice_id: int = 0


def group_hosts(members: Sequence[Member], replicas: int) -> list[list[str]]:
    """Returns the hosts of each group, in the order of its ring."""
    firsts: dict[str, Member] = {}
    for member in sorted(members, key=lambda member: member.rank):
        firsts.setdefault(member.host, member)
    hosts = sorted(firsts.values(), key=lambda member: (member.slice_id, member.rank))
    blocks = [list(found) for _, found in groupby(hosts, key=lambda member: member.slice_id)]
    if len(blocks) == 1:
        ends = [len(hosts) * block // (replicas + 1) for block in range(replicas + 2)]
        blocks = [hosts[first:end] for first, end in pairwise(ends)]
    dealt = [member.host for row in zip_longest(*blocks) for member in row if member is not None]
    size = replicas + 1
    starts = range(0, max(1, len(dealt) // size) * size, size)
    return [dealt[start:end] for start, end in pairwise([*starts, len(dealt)])]


def place_copies(members: Sequence[Member], replicas: int) -> list[list[int]]:
    """Returns for each rank the ranks that keep a copy of its part: one on each of `replicas` other
    hosts, if there are so many.
    """
    ranks: dict[str, list[int]] = {}
    for member in sorted(members, key=lambda member: member.rank):
        ranks.setdefault(member.host, []).append(member.rank)
    copies: list[list[int]] = [[] for _ in members]
    for ring in group_hosts(members, replicas):
        for at, host in enumerate(ring):
            others = [
                ring[(at + turn) % len(ring)] for turn in range(1, min(replicas + 1, len(ring)))
            ]
            for place, rank in enumerate(ranks[host]):
                copies[rank] = [ranks[other][place % len(ranks[other])] for other in others]
    return copies


def copied_by(copies: Sequence[Sequence[int]], rank: int) -> list[int]:
    """Returns the ranks of which a rank keeps copies."""
    return [owner for owner, others in enumerate(copies) if rank in others]
