"""Decides which machines a gang of processes gets: pure, from what each machine has, lacks and is about to lose."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Node:
    """Is one machine: what is free on it now, whether it is on its way out, and which slice it belongs to ("": none)."""

    node_id: str
    address: str
    available: Mapping[str, float]
    draining: bool = False
    slice_name: str = ""
    worker_id: int = 0
    deadline_unix_s: float | None = None  # of the drain
    total: Mapping[str, float] = field(default_factory=dict)

    def room(self, need: Mapping[str, float]) -> int:
        """Returns how many processes that need `need` fit."""
        counts = [math.floor(self.available.get(name, 0.0) / amount + 1e-9) for name, amount in need.items() if amount > 0]
        return min(counts, default=1_000_000)


@dataclass(frozen=True)
class Seats:
    """Says where each process of a gang goes, by rank: ranks of a slice, and of a machine in it, are contiguous."""

    nodes: tuple[Node, ...] = ()
    num_slices: int = 1
    why_not: str = ""  # what stands in the way of more

    @property
    def slice_of(self) -> tuple[int, ...]:
        """Is the slice of each rank, by Ray's and the TPU runtime's formula."""
        per_slice = max(1, math.ceil(len(self.nodes) / self.num_slices))
        return tuple(min(rank // per_slice, self.num_slices - 1) for rank in range(len(self.nodes)))


def seats(nodes: Iterable[Node], need: Mapping[str, float], least: int, most: int, slices: int = 1) -> Seats:
    """Returns the largest gang between `least` and `most` that fits now; empty, with the reason, where `least` does not.

    With `slices` above 1, a gang is made of whole slices of most / slices processes each, on machines of one slice name. A machine that is
    draining is no capacity, and neither is its slice.
    """
    nodes = sorted(nodes, key=_order)
    return _in_slices(nodes, need, least, most, slices) if slices > 1 else _plain(nodes, need, least, most)


def _order(node: Node) -> tuple[object, ...]:
    return _natural(node.slice_name), node.worker_id, _natural(node.address), node.node_id


def _natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts "slice-10" after "slice-9": the index counts as an integer."""
    parts = re.findall(r"\d+|\D+", text)
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts)


def _plain(nodes: list[Node], need: Mapping[str, float], least: int, most: int) -> Seats:
    chosen = [node for node in nodes if not node.draining for _ in range(min(most, node.room(need)))][:most]
    draining = sum(node.draining for node in nodes)
    found = f"room for {len(chosen)} of {most} processes on {len(nodes)} machines, {draining} of them draining"
    return Seats(tuple(chosen) if len(chosen) >= least else (), 1, "" if len(chosen) == most else found)


def _in_slices(nodes: list[Node], need: Mapping[str, float], least: int, most: int, slices: int) -> Seats:
    per_slice = most // slices
    whole: list[list[Node]] = []
    problems: list[str] = []
    names = dict.fromkeys(node.slice_name for node in nodes if node.slice_name)
    for name in names:
        members = [node for node in nodes if node.slice_name == name]
        places = [node for node in members for _ in range(min(per_slice, node.room(need)))]
        if leaving := [node for node in members if node.draining]:
            problems.append(f"slice {name} has {len(leaving)} of {len(members)} machines draining")
        elif len(places) < per_slice:
            problems.append(f"slice {name} has room for {len(places)} of {per_slice} processes")
        else:
            whole.append(_spread(members, need, per_slice))
    chosen = whole[:slices]
    flat = tuple(node for places in chosen for node in places)
    why = "" if len(chosen) == slices else f"{len(chosen)} of {slices} slices are whole" + "".join(f"; {text}" for text in problems)
    return Seats(flat, len(chosen), why) if len(flat) >= least and flat else Seats(why_not=why)


def _spread(members: list[Node], need: Mapping[str, float], count: int) -> list[Node]:
    """Deals `count` processes over a slice's machines as evenly as they fit: each machine's chips must all be used."""
    share = {node.node_id: 0 for node in members}
    while sum(share.values()) < count:
        free = [node for node in members if share[node.node_id] < node.room(need)]
        share[min(free, key=lambda node: (share[node.node_id], node.worker_id)).node_id] += 1
    return [node for node in members for _ in range(share[node.node_id])]
