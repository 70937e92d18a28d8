"""Decides which machines a gang of processes gets: pure, from what is free on each, what is
leaving, and which slices are whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """One machine: what is free on it now, whether it is draining, and which slice it belongs to
    ("": none).
    """

    node_id: str
    address: str
    available: Mapping[str, float]
    draining: bool = False
    slice_name: str = ""
    worker_id: int = 0
    deadline_unix_s: float | None = None  # of the drain

    def room(self, resources: Mapping[str, float]) -> int:
        """Returns how many processes fit that need these resources each."""
        counts = [
            math.floor(self.available.get(name, 0.0) / amount + 1e-9)
            for name, amount in resources.items()
            if amount > 0
        ]
        return min(counts, default=1_000_000)


@dataclass(frozen=True)
class Placement:
    """The machine of each process of a gang, by rank: ranks of a slice, and of a machine in it, are
    contiguous.
    """

    nodes: tuple[Node, ...] = ()
    num_slices: int = 1
    why_not_more: str = ""

    @property
    def slice_of(self) -> tuple[int, ...]:
        """The slice of each rank, by Ray's and the TPU runtime's formula."""
        per_slice = max(1, math.ceil(len(self.nodes) / self.num_slices))
        return tuple(min(rank // per_slice, self.num_slices - 1) for rank in range(len(self.nodes)))


def place_gang(
    nodes: Iterable[Node],
    resources: Mapping[str, float],
    min_processes: int,
    max_processes: int,
    num_slices: int = 1,
) -> Placement:
    """Returns the largest gang between `min_processes` and `max_processes` that fits now; where
    none fits, an empty one with the reason.

    With `num_slices` above 1, a gang is made of whole slices of max_processes / num_slices
    processes each, on machines of one slice name. A machine that is draining is no capacity, and
    neither is its slice.
    """
    nodes = sorted(nodes, key=_order)
    if num_slices > 1:
        return _place_slices(nodes, resources, min_processes, max_processes, num_slices)
    return _place_processes(nodes, resources, min_processes, max_processes)


def _order(node: Node) -> tuple[object, ...]:
    return _natural(node.slice_name), node.worker_id, _natural(node.address), node.node_id


def _natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts "slice-10" after "slice-9": the index counts as an integer."""
    parts = re.findall(r"\d+|\D+", text)
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts)


def _place_processes(
    nodes: list[Node], resources: Mapping[str, float], min_processes: int, max_processes: int
) -> Placement:
    chosen = [
        node
        for node in nodes
        if not node.draining
        for _ in range(min(max_processes, node.room(resources)))
    ]
    chosen = chosen[:max_processes]
    draining = sum(node.draining for node in nodes)
    reason = (
        f"room for {len(chosen)} of {max_processes} processes on {len(nodes)} machines, {draining}"
        " of them draining"
    )
    return Placement(
        tuple(chosen) if len(chosen) >= min_processes else (),
        1,
        "" if len(chosen) == max_processes else reason,
    )


def _place_slices(
    nodes: list[Node],
    resources: Mapping[str, float],
    min_processes: int,
    max_processes: int,
    num_slices: int,
) -> Placement:
    per_slice = max_processes // num_slices
    whole: list[list[Node]] = []
    problems: list[str] = []
    names = dict.fromkeys(node.slice_name for node in nodes if node.slice_name)
    for name in names:
        members = [node for node in nodes if node.slice_name == name]
        room = sum(min(per_slice, node.room(resources)) for node in members)
        if leaving := [node for node in members if node.draining]:
            problems.append(f"slice {name} has {len(leaving)} of {len(members)} machines draining")
        elif room < per_slice:
            problems.append(f"slice {name} has room for {room} of {per_slice} processes")
        else:
            whole.append(_deal(members, resources, per_slice))
    chosen = whole[:num_slices]
    flat = tuple(node for members in chosen for node in members)
    why = (
        ""
        if len(chosen) == num_slices
        else f"{len(chosen)} of {num_slices} slices are whole"
        + "".join(f"; {text}" for text in problems)
    )
    return (
        Placement(flat, len(chosen), why)
        if len(flat) >= min_processes and flat
        else Placement(why_not_more=why)
    )


def _deal(members: list[Node], resources: Mapping[str, float], count: int) -> list[Node]:
    """Deals `count` processes over a slice's machines as evenly as they fit: each machine's chips
    must all be used.
    """
    share = {node.node_id: 0 for node in members}
    while sum(share.values()) < count:
        free = [node for node in members if share[node.node_id] < node.room(resources)]
        share[min(free, key=lambda node: (share[node.node_id], node.worker_id)).node_id] += 1
    return [node for node in members for _ in range(share[node.node_id])]
