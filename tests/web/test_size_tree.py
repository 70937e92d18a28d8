"""A checkpoint's leaves as a tree of sizes, and its boxes in a place."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from holdfast.web.size_tree import Node, boxes, size_tree
from holdfast.web.treemap import Rectangle

PLACE = Rectangle(0.0, 0.0, 1160.0, 600.0)


def leaf(path: str, size: int, **more: Any) -> dict[str, Any]:
    """Returns an array of an item."""
    facts = {"item": "state", "path": path, "dtype": "float32", "shape": [size], "bytes": size}
    return facts | more


def names(node: Node) -> dict[str, Any]:
    """Returns the names of a node's nodes, nested."""
    return {each.name: names(each) for each in node.nodes}


def leaves(node: Node) -> list[Node]:
    """Returns the nodes that have none of their own."""
    if not node.nodes:
        return [node]
    return [found for each in node.nodes for found in leaves(each)]


def test_the_tree_is_nested_by_item_and_path() -> None:
    """The largest first; a branch with one node is no frame of its own."""
    tree = size_tree(
        [
            leaf("mlp.up.kernel", 8),
            leaf("mlp.up.bias", 4),
            leaf("mlp.down.kernel", 20),
            leaf("", 5, item="other", dtype="int32"),
        ],
        10,
    )
    assert names(tree) == {
        "state.mlp": {"down.kernel": {}, "up": {"kernel": {}, "bias": {}}},
        "other": {},
    }
    assert (tree.nbytes, tree.count, tree.dtype) == (37, 4, "")
    assert tree.nodes[0].dtype == "float32"


def test_a_point_in_a_key_is_no_branch() -> None:
    """A path's keys are escaped as docs/format.md says."""
    tree = size_tree([leaf(r"a\.b.c", 8), leaf(r"d\\.e", 8), leaf(r"\x07.f", 8)], 10)
    assert sorted(names(tree.nodes[0])) == [r"\x07.f", r"a\.b.c", r"d\\.e"]
    assert [node.path for node in leaves(tree)] == [
        r"state.a\.b.c",
        r"state.d\\.e",
        r"state.\x07.f",
    ]


def test_what_has_changed_of_a_branch_is_by_its_bytes() -> None:
    """One leaf of which that is not known leaves it open."""
    known = [leaf("a", 30, changed=1.0), leaf("b", 10, changed=0.0)]
    assert size_tree(known, 10).changed == 0.75
    assert size_tree([*known, leaf("c", 1)], 10).changed is None


def test_small_leaves_of_a_branch_are_one() -> None:
    """So are the branches that have only such leaves; no byte and no leaf is lost."""
    many = [leaf(f"{branch}.{n}", n + 1) for branch in "ab" for n in range(100)]
    tree = size_tree([*many, leaf("c.d.e", 1), leaf("c.f", 1)], 50)
    assert tree.nbytes == 2 * 5050 + 2
    assert sum(node.count for node in leaves(tree)) == 202
    together = {node.path: node.name for node in leaves(tree) if node.count > 1}
    assert together == {"state.a": "75 smaller", "state.b": "75 smaller", "state": "2 smaller"}
    assert len(leaves(tree)) == 50 + len(together)


@given(st.dictionaries(st.text("ab.", min_size=1, max_size=9), st.integers(1, 10**9), min_size=1))
def test_boxes_lie_in_the_boxes_around_them(sizes: dict[str, int]) -> None:
    """Each opened box holds its own nodes, below its header and beside each other."""
    tree = size_tree([leaf(path, size) for path, size in sizes.items()], 100)
    found = list(boxes(tree, PLACE))
    assert sum(box.node.nbytes for box in found if not box.opened) == tree.nbytes
    by_node = {id(box.node): box.place for box in found}
    for box in found:
        for node in box.node.nodes if box.opened else ():
            inner = by_node[id(node)]
            assert inner.x >= box.place.x - 1e-3
            assert inner.y >= box.place.y + 17
            assert inner.x + inner.width <= box.place.x + box.place.width + 1e-3
            assert inner.y + inner.height <= box.place.y + box.place.height + 1e-3
