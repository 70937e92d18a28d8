"""Devices of all nodes are numbered densely, in node order, once the last has reported."""

from __future__ import annotations

from typing import Any

from holdfast.coordination.core.calls import Call
from holdfast.coordination.core.devices import Devices, Node
from holdfast.coordination.core.status import Code, Status


class Nodes:
    """The devices of two nodes, and who was answered what."""

    def __init__(self) -> None:
        self.devices = Devices(2)
        self.answers: list[Call] = []

    def enumerate(self, node_id: int, *devices: str) -> Call:
        call = Call(self.answers, node_id, 0.0)
        self.devices.enumerate(call, node_id, Node(list(devices)))
        return call

    def numbered(self) -> list[tuple[int, Any]]:
        taken = [(call.task_id, call.value) for call in self.answers]
        self.answers.clear()
        return taken


def test_devices_are_numbered_in_node_order() -> None:
    """Nobody is answered before all nodes have reported, in whatever order they come; a second
    report answers again, alike.
    """
    nodes = Nodes()
    nodes.enumerate(1, "x", "y")
    assert nodes.numbered() == []
    nodes.enumerate(0, "z")
    numbered = [(0, Node(["z"]), 0), (1, Node(["x", "y"]), 1)]
    assert nodes.numbered() == [(1, numbered), (0, numbered)]
    nodes.enumerate(1, "x", "y")
    assert nodes.numbered() == [(1, numbered)]


def test_a_failure_ends_all_that_wait() -> None:
    """What a node has reported stays, so the others need not come again."""
    nodes = Nodes()
    failed = nodes.enumerate(0)
    status = Status(Code.INTERNAL, "lost")
    nodes.devices.fail(status)
    assert nodes.answers == [failed] and failed.status is status
    nodes.answers.clear()
    nodes.enumerate(1, "x")
    assert nodes.numbered() == [(1, [(0, Node([]), 0), (1, Node(["x"]), 0)])]


def test_a_dropped_call_is_not_answered() -> None:
    """Its node's devices count all the same."""
    nodes = Nodes()
    nodes.enumerate(0, "x").drop()
    here = nodes.enumerate(1)
    assert nodes.answers == [here]
