"""The devices of all nodes, as profile D enumerates them: each node reports its own, and they are
numbered when all have. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .calls import Call, Line
from .status import Status


@dataclass(slots=True)
class Node:
    """What one node has reported: its devices, in order of their local ordinals, and the id of its
    boot.
    """

    devices: list[Any]
    boot_id: str = ""


@dataclass(slots=True)
class Devices:
    """Waits for every node of the job."""

    num_nodes: int
    nodes: dict[int, Node] = field(default_factory=dict)
    # node: the version of profile D that it speaks
    versions: dict[int, int] = field(default_factory=dict)
    _line: Line = field(default_factory=Line)

    def enumerate(self, call: Call, node_id: int, node: Node) -> None:
        """Takes a node's devices, and answers all nodes when the last one's have come.

        A node that asks again replaces its devices, and gets the same global ids.
        """
        self.nodes[node_id] = node
        self._line.enter(call)
        if len(self.nodes) == self.num_nodes:
            self._line.succeed(self._numbered())

    def _numbered(self) -> list[tuple[int, Node, int]]:
        """Returns (node id, node, global id of its first device) in node order."""
        first = 0
        numbered = []
        for node_id in sorted(self.nodes):
            numbered.append((node_id, self.nodes[node_id], first))
            first += len(self.nodes[node_id].devices)
        return numbered

    def forget(self) -> None:
        """Forgets what all nodes have reported."""
        self.nodes.clear()
        self.versions.clear()

    def fail(self, status: Status) -> None:
        """Fails all who wait."""
        self._line.fail(status)
