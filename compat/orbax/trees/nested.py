"""Trees as plain dicts and lists, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from .flat import get_key_name, is_empty_or_leaf, is_sequence_key


def from_flattened_with_keypath(flat_with_keys: Sequence[tuple[Any, Any]]) -> Any:
    """Returns dicts and lists of leaves with their paths. Raises ValueError without any."""
    if not flat_with_keys:
        raise ValueError("a tree without leaves may be of any kind: expected one leaf or more")
    if not flat_with_keys[0][0]:  # the tree is one leaf
        return flat_with_keys[0][1]
    root: dict[Any, Any] = {}
    for path, leaf in flat_with_keys:
        node = root
        for key in path[:-1]:
            node = node.setdefault(get_key_name(key), {})
        node[get_key_name(path[-1])] = leaf
    return _lists(root, [path for path, _ in flat_with_keys], 0)


def _lists(node: Any, paths: Sequence[Any], depth: int) -> Any:
    """Returns a node whose children are called by indices as a list."""
    below = [path for path in paths if len(path) > depth]
    if not below:
        return node
    names = {name: [path for path in below if get_key_name(path[depth]) == name] for name in node}
    children = {name: _lists(node[name], names[name], depth + 1) for name in node}
    if is_sequence_key(below[0][depth]):
        return [children[index] for index in sorted(children)]
    return children


def serialize_tree(tree: Any, keep_empty_nodes: bool = False) -> Any:
    """Returns a tree in dicts and lists. Raises ValueError for an empty one."""
    is_leaf = is_empty_or_leaf if keep_empty_nodes else None
    return from_flattened_with_keypath(
        jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    )


def deserialize_tree(serialized: Any, target: Any, keep_empty_nodes: bool = False) -> Any:
    """Returns a tree in the structure of `target`, of what `serialize_tree` gave."""
    is_leaf = is_empty_or_leaf if keep_empty_nodes else None
    return jax.tree_util.tree_map_with_path(
        lambda path, _: _look_up(serialized, path), target, is_leaf=is_leaf
    )


def _look_up(tree: Any, path: Sequence[Any]) -> Any:
    for key in path:
        tree = _child(tree, key)
    return tree


def _child(node: Any, key: Any) -> Any:
    if type(node) in (dict, list, tuple):
        name = get_key_name(key)
        return node[str(name) if isinstance(node, dict) and name not in node else name]
    match key:
        case SequenceKey(idx=index) | FlattenedIndexKey(key=index):
            return node[index]
        case DictKey(key=name):
            return node[name]
        case GetAttrKey(name=name):
            return node[name] if isinstance(node, Mapping) else getattr(node, name)
    raise ValueError(f"expected a key of a jax path, found {type(key).__name__}: {key!r}")


def merge_trees(
    *trees: Any, overwrite: bool = False, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Returns one tree with the leaves of all, in dicts and sequences of equal length.

    Raises ValueError for a leaf that two trees have, unless `overwrite`: then the last counts.
    """
    if not trees:
        return {}
    merged = trees[0]
    for tree in trees[1:]:
        merged = _merged(merged, tree, overwrite, is_leaf, ())
    return merged


def _merged(
    one: Any,
    two: Any,
    overwrite: bool,
    is_leaf: Callable[[Any], bool] | None,
    path: tuple[Any, ...],
) -> Any:
    are_leaves = is_leaf is not None and (is_leaf(one) or is_leaf(two))
    if not are_leaves and isinstance(one, Mapping) and isinstance(two, Mapping):
        both = {
            key: _merged(one[key], two[key], overwrite, is_leaf, (*path, key))
            for key in one
            if key in two
        }
        return {**one, **two, **both}
    if not are_leaves and type(one) is type(two) and isinstance(one, list | tuple):
        if len(one) != len(two):
            raise ValueError(f"{path}: sequences of {len(one)} and {len(two)} cannot be merged")
        pairs = enumerate(zip(one, two, strict=True))
        children = [_merged(a, b, overwrite, is_leaf, (*path, at)) for at, (a, b) in pairs]
        return type(one)(*children) if hasattr(one, "_fields") else type(one)(children)
    if not overwrite:
        raise ValueError(f"{path} is in two trees; pass overwrite=True for the last one's")
    return two


__all__ = ["deserialize_tree", "from_flattened_with_keypath", "serialize_tree"]
