"""`orbax.checkpoint.tree`: trees as flat dicts, whose keys are paths, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey


def get_key_name(key: Any) -> int | str:
    """Returns the name of one key of a path: the index in a list, else a text."""
    match key:
        case SequenceKey(idx=int(index)) | FlattenedIndexKey(key=int(index)):
            return index
        case DictKey(key=name) | GetAttrKey(name=name):
            return str(name)
    raise ValueError(f"expected a key of a jax path, found {type(key).__name__}: {key!r}")


def is_dict_key(key: Any) -> bool:
    """Says whether a key is of a dict or an attribute."""
    return isinstance(key, DictKey | GetAttrKey)


def is_sequence_key(key: Any) -> bool:
    """Says whether a key is an index."""
    return isinstance(key, SequenceKey | FlattenedIndexKey)


def str_keypath(keypath: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns a path of jax's as texts."""
    return tuple(str(get_key_name(key)) for key in keypath)


def is_empty_or_leaf(x: Any) -> bool:
    """Says whether a value has no children: an empty container, None or a leaf."""
    # Only the node itself is opened: its children count as leaves.
    children = jax.tree.leaves(x, is_leaf=lambda child: child is not x)
    return not children or children[0] is x


def is_empty_node(x: Any) -> bool:
    """Says whether a value is an empty container or None."""
    return not jax.tree.leaves(x, is_leaf=lambda child: child is not x)


def to_flat_dict(
    tree: Any,
    sep: str | None = None,
    keep_empty_nodes: bool = False,
    is_leaf: Callable[[Any], bool] | None = None,
) -> dict[Any, Any]:
    """Returns a tree's leaves by their paths: tuples of texts, with `sep` one text each."""
    if is_leaf is None and keep_empty_nodes:
        is_leaf = is_empty_or_leaf
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    flat = {str_keypath(path): leaf for path, leaf in leaves}
    return flat if sep is None else {sep.join(path): leaf for path, leaf in flat.items()}


def from_flat_dict(
    flat_dict: Mapping[Any, Any],
    target: Any = None,
    sep: str | None = None,
    *,
    inplace: bool = False,
) -> Any:
    """Returns the tree of a flat dict, in the structure of `target`; None: in dicts.

    With `inplace` the flat dict is empty afterwards of what is in the tree.
    """
    if inplace and not isinstance(flat_dict, dict):
        raise ValueError(f"inplace=True empties a dict, found {type(flat_dict)}")
    if target is not None:
        paths = list(to_flat_dict(target, sep=sep))
        tree = jax.tree.unflatten(jax.tree.structure(target), [flat_dict[path] for path in paths])
    else:
        paths = list(flat_dict)
        tree = _in_dicts(flat_dict, sep)
    if isinstance(flat_dict, dict) and inplace:
        for path in paths:
            del flat_dict[path]
    return tree


def _in_dicts(flat_dict: Mapping[Any, Any], sep: str | None) -> Any:
    if sep is None and () in flat_dict:  # the tree is one leaf
        return flat_dict[()]
    tree: dict[str, Any] = {}
    for path, leaf in flat_dict.items():
        *folders, name = path if sep is None else path.split(sep)
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return tree


def is_flat_dict(tree: Any) -> bool:
    """Says whether a tree is a dict of leaves."""
    return isinstance(tree, dict) and jax.tree_util.all_leaves(tree.values())


def get_param_names(item: Any, *, include_empty_nodes: bool = True) -> Any:
    """Returns a tree with the name of each leaf in its place."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: ".".join(str_keypath(path)),
        item,
        is_leaf=is_empty_or_leaf if include_empty_nodes else None,
    )


def merge_trees(*trees: Any, target: Any = None) -> Any:
    """Returns one tree with the leaves of all; the last that has a path counts."""
    merged: dict[Any, Any] = {}
    for tree in trees:
        merged |= to_flat_dict(tree)
    return from_flat_dict(merged, target=target)


def intersect_trees(*trees: Any, target: Any = None) -> Any:
    """Returns a tree with the paths that all have, and the last one's leaves."""
    flat = [to_flat_dict(tree) for tree in trees]
    common = {path: leaf for path, leaf in flat[-1].items() if all(path in each for each in flat)}
    return from_flat_dict(common, target=target)


tuple_path_from_keypath = str_keypath

__all__ = [
    "from_flat_dict",
    "get_key_name",
    "get_param_names",
    "intersect_trees",
    "is_dict_key",
    "is_empty_node",
    "is_empty_or_leaf",
    "is_flat_dict",
    "is_sequence_key",
    "merge_trees",
    "str_keypath",
    "to_flat_dict",
    "tuple_path_from_keypath",
]
