"""Decides which machines a gang of processes gets. Pure.

It goes by what is free on each machine, what is leaving, and which slices are whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """One machine."""

    node_id: str
    address: str
    available: Mapping[str, float]  # what is free on it now
    draining: bool = False
    slice_name: str = ""  # "": it belongs to none
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
    """The machine of each process, by rank. Ranks of a slice, and of a machine, are contiguous."""

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
    *,
    num_slices: int = 1,
) -> Placement:
    """Returns the largest gang of so many processes that fits now.

    Where none fits, it is an empty one with the reason. With `num_slices` above 1, a gang is made
    of whole slices of max_processes / num_slices processes each, on machines of one slice name. A
    machine that is draining is no capacity, and neither is its slice.
    """
    nodes = sorted(nodes, key=_order)
    if num_slices > 1:
        placement = _place_slices(nodes, resources, max_processes // num_slices, num_slices)
    else:
        placement = _place_processes(nodes, resources, max_processes)
    if len(placement.nodes) >= max(1, min_processes):
        return placement
    return Placement(why_not_more=placement.why_not_more)


def _order(node: Node) -> tuple[object, ...]:
    return _natural(node.slice_name), node.worker_id, _natural(node.address), node.node_id


def _natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts "slice-10" after "slice-9": the index counts as an integer."""
    parts = re.findall(r"\d+|\D+", text)
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts)


def _place_processes(
    nodes: list[Node], resources: Mapping[str, float], max_processes: int
) -> Placement:
    chosen: list[Node] = []
    for node in nodes:
        if not node.draining:
            chosen += [node] * min(max_processes - len(chosen), node.room(resources))
    if len(chosen) == max_processes:
        return Placement(tuple(chosen))
    draining = sum(node.draining for node in nodes)
    machines = f"{len(nodes)} machines, {draining} of them draining"
    why = f"room for {len(chosen)} of {max_processes} processes on {machines}"
    return Placement(tuple(chosen), why_not_more=why)


def _place_slices(
    nodes: list[Node], resources: Mapping[str, float], per_slice: int, num_slices: int
) -> Placement:
    slices: dict[str, list[Node]] = {}
    for node in nodes:
        if node.slice_name:
            slices.setdefault(node.slice_name, []).append(node)
    whole: list[list[Node]] = []
    problems: list[str] = []
    for name, members in slices.items():
        problem = _why_not_whole(members, resources, per_slice)
        if problem:
            problems.append(f"; slice {name} has {problem}")
        else:
            whole.append(_deal(members, resources, per_slice))
    chosen = whole[:num_slices]
    placed = tuple(node for members in chosen for node in members)
    if len(chosen) == num_slices:
        return Placement(placed, num_slices)
    why = f"{len(chosen)} of {num_slices} slices are whole{''.join(problems)}"
    return Placement(placed, len(chosen), why)


def _why_not_whole(members: list[Node], resources: Mapping[str, float], per_slice: int) -> str:
    draining = sum(node.draining for node in members)
    if draining:
        return f"{draining} of {len(members)} machines draining"
    room = sum(min(per_slice, node.room(resources)) for node in members)
    return f"room for {room} of {per_slice} processes" if room < per_slice else ""


def _deal(members: list[Node], resources: Mapping[str, float], count: int) -> list[Node]:
    """Deals `count` processes over a slice's machines as evenly as they fit.

    Each machine's chips must all be used.
    """
    share = dict.fromkeys((node.node_id for node in members), 0)
    for _ in range(count):
        free = [node for node in members if share[node.node_id] < node.room(resources)]
        least = min(free, key=lambda node: (share[node.node_id], node.worker_id))
        share[least.node_id] += 1
    return [node for node in members for _ in range(share[node.node_id])]
