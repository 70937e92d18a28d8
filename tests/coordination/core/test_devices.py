"""Devices of all nodes are numbered densely, in node order, once the last has reported."""

from __future__ import annotations

from holdfast.coordination.core.devices import Devices, Node
from holdfast.coordination.core.status import Code, Completion, Completions, Status


def test_devices_are_numbered_in_node_order() -> None:
    """Nobody is answered before all nodes have reported, in whatever order they come; a second
    report answers again, alike.
    """
    completions = Completions()
    devices = Devices(2, completions)
    devices.enumerate("second", 1, Node(["x", "y"]))
    assert completions == []
    devices.enumerate("first", 0, Node(["z"]))
    numbered = [(0, Node(["z"]), 0), (1, Node(["x", "y"]), 1)]
    assert completions == [
        Completion("second", numbered, None),
        Completion("first", numbered, None),
    ]
    devices.enumerate("again", 1, Node(["x", "y"]))
    assert completions[2:] == [Completion("again", numbered, None)]


def test_a_failure_ends_all_that_wait() -> None:
    """What a node has reported stays, so the others need not come again."""
    completions = Completions()
    devices = Devices(2, completions)
    devices.enumerate("a", 0, Node([]))
    status = Status(Code.INTERNAL, "lost")
    devices.fail(status)
    assert completions == [Completion("a", None, status)]
    devices.enumerate("b", 1, Node(["x"]))
    assert completions[1].value == [(0, Node([]), 0), (1, Node(["x"]), 0)]


def test_a_dropped_call_is_not_answered() -> None:
    """Its node's devices count all the same."""
    completions = Completions()
    devices = Devices(2, completions)
    devices.enumerate("gone", 0, Node(["x"]))
    assert devices.drop("gone") and not devices.drop("gone")
    devices.enumerate("here", 1, Node([]))
    assert [completion.call for completion in completions] == ["here"]
