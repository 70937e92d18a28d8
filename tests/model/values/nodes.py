"""Nodes: what a tree is made of, of the standard library and of other libraries."""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
from typing import Any, NamedTuple

import attrs
import chex
import equinox
import flax.core
import flax.struct
import jax
import numpy as np
import optax
from flax import nnx
from hypothesis import strategies as st

from .leaves import TEXTS, Level, is_storable, leaves


class Point(NamedTuple):
    """A namedtuple."""

    x: Any
    y: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """A dataclass that jax knows, with a field that is no leaf."""

    w: Any
    b: Any
    kind: Any = dataclasses.field(default="dense", metadata={"static": True})


class Box:
    """A class that is registered with keys."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside


class Bag(dict[str, Any]):
    """A dict that is registered without keys: its children go by position."""


class Net:
    """A module whose leaves are children in the order of their assignment, and all else static."""

    def __init__(self, children: dict[str, Any], static: Any = None) -> None:
        self.children = children
        self.static = static


class Switch(enum.StrEnum):
    """Texts that are static."""

    ON = "on"


class Params(equinox.Module):
    """A module of equinox."""

    weight: Any
    name: str = equinox.field(static=True, default="p")


class State(flax.struct.PyTreeNode):
    """A dataclass of flax."""

    step: Any
    params: Any


class Dense(nnx.Module):
    """A module of nnx, which is a tree by itself and by its state."""

    def __init__(self, kernel: Any, rate: Any = 0.1) -> None:
        self.kernel = nnx.Param(kernel)
        self.rate = rate


@chex.dataclass
class Transition:
    """A dataclass of chex."""

    reward: Any
    action: Any


@attrs.define
class Moments:
    """A class of attrs, which jax has been told the fields of."""

    mean: Any
    count: Any
    name: Any = "moments"


jax.tree_util.register_pytree_with_keys(
    Box,
    lambda box: (((jax.tree_util.GetAttrKey("inside"), box.inside),), None),
    lambda _, children: Box(*children),
)
jax.tree_util.register_pytree_node(
    Bag,
    lambda bag: (tuple(bag.values()), tuple(bag)),
    lambda keys, children: Bag(zip(keys, children, strict=True)),
)

jax.tree_util.register_pytree_node(
    Net,
    lambda net: (tuple(net.children.values()), (tuple(net.children), net.static)),
    lambda data, children: Net(dict(zip(data[0], children, strict=True)), data[1]),
)
jax.tree_util.register_static(Switch)
jax.tree_util.register_dataclass(Moments, ["mean", "count"], ["name"])

# "mlp/~/linear_0" is a name as haiku gives them; its trees are plain dicts.
_NAMES = ["k", "q", "params", "mlp/~/linear_0", "0", "1", "format", "step", "__metadata__"]
_NAMES += ["a\nb", "ax0ab"]
KEYS = st.one_of(TEXTS, st.sampled_from(_NAMES))
ODD_KEYS = st.sampled_from([1.5, None, True, (1, 2), b"k", Level.LOW, frozenset()])
STATICS = st.sampled_from(
    ["dense", 3, None, (1, "a"), Level.LOW, len, {"a": (1.5, b"b")}, Switch.ON, math.nan]
)


def _params(weight: Any) -> Any:
    """Returns a module, which equinox makes only of what jax can take apart."""
    try:
        return Params(weight)
    except ValueError:
        return Box(weight)


def _nnx(kernel: Any, kind: str) -> Any:
    """Returns a module of nnx, or its state, which are made only of what nnx can take apart."""
    try:
        module = Dense(kernel)
        made = {
            "module": module,
            "state": nnx.state(module),
            "pure": nnx.to_pure_dict(nnx.state(module)),
        }[kind]
        jax.tree_util.tree_flatten_with_path(made)
    except (TypeError, ValueError, AttributeError):
        return Box(kernel)
    return made


def _nodes(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    by_text = st.dictionaries(KEYS, inner, max_size=3)
    pairs = st.lists(st.tuples(KEYS, inner), max_size=3, unique_by=lambda pair: pair[0])
    return st.one_of(
        [
            by_text,
            st.dictionaries(st.integers(-2, 12), inner, max_size=3),
            st.dictionaries(st.one_of(KEYS, st.integers(0, 3), ODD_KEYS), inner, max_size=2),
            pairs.map(collections.OrderedDict),
            by_text.map(lambda members: collections.defaultdict(int, members)),
            by_text.map(flax.core.FrozenDict),
            by_text.map(Bag),
            st.builds(Net, by_text, STATICS | st.just(np.arange(3))),
            st.just(Switch.ON),
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.builds(Point, inner, inner),
            st.builds(Layer, inner, inner, STATICS),
            st.builds(Box, inner),
            st.builds(_params, inner),
            st.builds(State, inner, inner),
            st.builds(_nnx, inner, st.sampled_from(["module", "state", "pure"])),
            st.builds(Transition, reward=inner, action=inner),
            st.builds(Moments, inner, inner, STATICS),
            st.builds(optax.ScaleByAdamState, inner, inner, inner),
            st.builds(optax.MaskedNode),
            st.none(),
        ]
    )


def trees() -> st.SearchStrategy[Any]:
    """Draws any tree."""
    return st.recursive(leaves(), _nodes, max_leaves=6)


def swapped(tree: Any) -> tuple[Any, bool]:
    """Returns a tree in which the children by position of some nodes are in another order, and
    whether there is such a node. One without leaves has nothing to swap.
    """
    found = False

    def swap(node: Any) -> Any:
        nonlocal found
        if not jax.tree_util.tree_leaves(node):
            return node
        if isinstance(node, Bag) and len(node) > 1:
            found = True
            return Bag(reversed(node.items()))
        if isinstance(node, Net) and len(node.children) > 1:
            found = True
            return Net(dict(reversed(node.children.items())), node.static)
        return node

    back = jax.tree_util.tree_map(swap, tree, is_leaf=lambda node: isinstance(node, Bag | Net))
    return back, found


def may_not_be_refused(tree: Any) -> bool:
    """Says whether holdfast has to take a tree: of usual leaves, under usual keys."""
    if isinstance(tree, dict | flax.core.FrozenDict):
        keys = list(tree)
        if len({*map(type, keys)} - {str}) > 0 and {*map(type, keys)} != {int}:
            return False
        return all(is_storable(key) for key in keys) and all(map(may_not_be_refused, tree.values()))
    if type(tree) in (list, tuple):
        return all(map(may_not_be_refused, tree))
    return tree is None or is_storable(tree)


def _plain_nodes(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.one_of(KEYS, KEYS, st.integers(0, 3), ODD_KEYS)
    return st.one_of(
        [
            st.dictionaries(KEYS, inner, max_size=3),
            st.dictionaries(keys, inner, max_size=3),
            st.dictionaries(KEYS, inner, max_size=2).map(collections.OrderedDict),
            st.dictionaries(KEYS, inner, max_size=2).map(collections.Counter),
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.builds(Point, inner, inner),
            st.none(),
        ]
    )


def states() -> st.SearchStrategy[Any]:
    """Draws what an iterator, a JSON item or metadata may be of: no tree of jax."""
    return st.recursive(leaves(), _plain_nodes, max_leaves=6)


def metrics() -> st.SearchStrategy[Any]:
    """Draws metrics, and what is none."""
    return st.one_of(
        st.dictionaries(KEYS, leaves(), max_size=3),
        st.dictionaries(st.one_of(KEYS, st.integers(), ODD_KEYS), leaves(), max_size=2),
        leaves(),
    )
