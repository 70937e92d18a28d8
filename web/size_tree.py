"""The sizes of a checkpoint as a tree: items, the branches of their trees, leaves. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .treemap import Rectangle, squarify

HEADER_HEIGHT = 18.0
_MARGIN = 2.0
_LEAST_WIDTH = 58.0  # of a branch whose own nodes are drawn: its name has to be read above them
_LEAST_HEIGHT = 46.0
_KEY = re.compile(r"(?:\\.|[^.\\])+")  # of a leaf's path, in which keys are escaped


@dataclass(frozen=True)
class Node:
    """An item, a branch of its tree, or a leaf.

    `dtype` is that of all its leaves, "" where they differ. `changed` is the share of its bytes
    that has changed, None where that is not known. `fact` says more of a leaf.
    """

    name: str
    path: str
    nbytes: int
    dtype: str = ""
    changed: float | None = None
    fact: str = ""
    count: int = 1  # of leaves
    nodes: tuple[Node, ...] = ()


class Box(NamedTuple):
    """A node and its place; an `opened` one has its nodes inside, below a header."""

    node: Node
    place: Rectangle
    opened: bool


class _Keyed(NamedTuple):
    """A leaf with those of its keys that are below some branch."""

    keys: Sequence[str]
    leaf: Mapping[str, Any]
    large: bool


def size_tree(arrays: Sequence[Mapping[str, Any]], most_leaves: int) -> Node:
    """Returns the arrays of a checkpoint, as `holdfast show --json` has them, as one tree.

    Only the `most_leaves` largest leaves stand for themselves. Of each branch all others are one
    node, together with the branches that have only such leaves.
    """
    by_size = sorted((leaf for leaf in arrays if leaf["bytes"]), key=lambda leaf: -leaf["bytes"])
    keyed = [
        _Keyed([leaf["item"], *_KEY.findall(leaf["path"])], leaf, number < most_leaves)
        for number, leaf in enumerate(by_size)
    ]
    return _branch("", "", keyed)


def _branch(name: str, path: str, keyed: Sequence[_Keyed]) -> Node:
    """Returns the node of the leaves below `path`."""
    below: dict[str, list[_Keyed]] = defaultdict(list)
    for each in keyed:
        below[each.keys[0]].append(each._replace(keys=each.keys[1:]))
    nodes: list[Node] = []
    small: list[Node] = []
    for key, its in below.items():
        found = nodes if any(each.large for each in its) else small
        ends = [each.leaf for each in its if not each.keys]
        found += [_leaf(key, _join(path, key), leaf) for leaf in ends]
        longer = [each for each in its if each.keys]
        if longer:
            found.append(_shortened(_branch(key, _join(path, key), longer)))
    if small:
        together = _together("", path, small)
        nodes.append(replace(together, name=f"{together.count} smaller", nodes=()))
    return _together(name, path, nodes)


def _leaf(name: str, path: str, leaf: Mapping[str, Any]) -> Node:
    return Node(
        name,
        path,
        leaf["bytes"],
        dtype=leaf["dtype"],
        changed=leaf.get("changed"),
        fact=f"{leaf['dtype']} {leaf['shape']}",
    )


def _together(name: str, path: str, nodes: Sequence[Node]) -> Node:
    ordered = tuple(sorted(nodes, key=lambda node: -node.nbytes))
    total = sum(node.nbytes for node in nodes)
    dtypes = {node.dtype for node in nodes}
    changed = None
    if total and all(node.changed is not None for node in nodes):
        changed = sum((node.changed or 0.0) * node.nbytes for node in nodes) / total
    return Node(
        name,
        path,
        total,
        dtype=dtypes.pop() if len(dtypes) == 1 else "",
        changed=changed,
        count=sum(node.count for node in nodes),
        nodes=ordered,
    )


def _shortened(node: Node) -> Node:
    """Returns a branch with one node as that node: a frame around it would say nothing."""
    if len(node.nodes) != 1:
        return node
    only = node.nodes[0]
    return replace(only, name=f"{node.name}.{only.name}")


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def boxes(node: Node, place: Rectangle) -> Iterator[Box]:
    """Yields the nodes below `node`, each branch before its own nodes, in their places.

    A branch that is too small for its nodes is drawn as one.
    """
    places = squarify([each.nbytes for each in node.nodes], place)
    for each, its in zip(node.nodes, places, strict=True):
        roomy = its.width >= _LEAST_WIDTH and its.height >= _LEAST_HEIGHT
        opened = roomy and bool(each.nodes)
        yield Box(each, its, opened)
        if opened:
            inside = Rectangle(
                its.x + _MARGIN,
                its.y + HEADER_HEIGHT,
                its.width - 2 * _MARGIN,
                its.height - HEADER_HEIGHT - _MARGIN,
            )
            yield from boxes(each, inside)
