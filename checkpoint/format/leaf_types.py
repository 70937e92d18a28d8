"""Leaf types of users: a value that jax takes for a leaf is saved as a small tree, under a name.

In a record such a leaf is an object of that name with fields, as an instance of any class is:
readers that do not know the name see a `Node`. A record never leads to an import; what makes values
of a name is what this process has registered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from ..errors import TreeMismatch, UnsupportedLeaf, error_text, leaf_at
from .tree import FlatTree, Node, type_name

T = TypeVar("T")


@dataclass(frozen=True)
class _LeafType:
    name: str
    to_fields: Callable[[Any], Mapping[str, Any]]
    from_fields: Callable[[dict[str, Any]], Any]


_by_class: dict[type, _LeafType] = {}
_by_name: dict[str, _LeafType] = {}


def register_leaf_type(
    cls: type[T],
    to_fields: Callable[[T], Mapping[str, Any]],
    from_fields: Callable[[dict[str, Any]], T],
    *,
    name: str = "",
) -> None:
    """Registers a class whose instances jax takes for leaves, for saves and restores of this
    process. Thread-safe.

    `to_fields(value)` returns what can be saved, by names of type str: arrays, numbers, strings,
    trees of them; `from_fields` makes the value of such a dict, as it was restored. `name` stands
    in the record ("": module and name of the class); whoever restores registers under the same.
    Raises ValueError for a name that another class has.
    """
    known = _LeafType(name or type_name(cls), to_fields, from_fields)
    if any(other is not cls and found.name == known.name for other, found in _by_class.items()):
        raise ValueError(
            f"register_leaf_type: the name {known.name!r} is another class's; give one of its own:"
            " name=..."
        )
    _by_class[cls] = _by_name[known.name] = known


def encode_leaf_types(tree: FlatTree) -> FlatTree:
    """Returns the tree with each leaf of a registered type as a Node of its fields.

    Raises UnsupportedLeaf naming the leaf.
    """
    if not _by_class or not any(type(leaf) in _by_class for leaf in tree.leaves):
        return tree
    encoded = [_encode(leaf, path) for leaf, path in zip(tree.leaves, tree.paths, strict=True)]
    return FlatTree.of(tree.treedef.unflatten(encoded))


def _encode(leaf: Any, path: str) -> Any:
    known = _by_class.get(type(leaf))
    if known is None:
        return leaf
    try:
        fields = known.to_fields(leaf)
        for key in fields:
            if type(key) is not str:
                raise TypeError(f"a field is called {key!r}, expected a str: name it {str(key)!r}")
        return Node(
            known.name,
            {key: encode_leaf_types(FlatTree.of(fields[key])).tree() for key in fields},
        )
    except Exception as error:
        raise UnsupportedLeaf(
            f"{leaf_at(path)} is a {type_name(type(leaf))}, whose to_fields failed:"
            f" {error_text(error)}",
            leaf=path,
            found=type_name(type(leaf)),
        ) from error


def decode_leaf_types(tree: Any) -> Any:
    """Returns the tree with each Node of a registered name as the value that is made of it."""
    if not _by_name:
        return tree
    return jax.tree_util.tree_map(_decode, tree, is_leaf=_is_registered)


def _is_registered(node: Any) -> bool:
    return isinstance(node, Node) and node.type_name in _by_name


def _decode(node: Any) -> Any:
    if not _is_registered(node):
        return node
    return make_leaf(
        node.type_name, {str(key): decode_leaf_types(value) for key, value in node.items()}
    )


def leaf_makers() -> Mapping[str, Callable[[dict[str, Any]], Any]]:
    """Returns what makes values of fields, by the names that are registered."""
    return {name: lambda fields, name=name: make_leaf(name, fields) for name in _by_name}  # type: ignore[misc]


def make_leaf(name: str, fields: dict[str, Any]) -> Any:
    """Returns the value of a registered name; raises TreeMismatch where its fields make none."""
    try:
        return _by_name[name].from_fields(fields)
    except Exception as error:
        raise TreeMismatch(
            f"the leaf type {name!r} cannot be made of its fields {sorted(fields)}:"
            f" {error_text(error)}",
            expected=name,
            found=str(sorted(fields)),
        ) from error
