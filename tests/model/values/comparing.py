"""What is equal: in value, type, dtype, weakness and sharding, leaf by leaf."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import jax
import numpy as np

from holdfast.checkpoint import Node

from .places import is_same_place


class Different(AssertionError):
    """Says where two values differ, and how."""


def host_leaf(leaf: Any) -> Any:
    """Returns a leaf as it comes back without a `like`: arrays of jax as numpy, keys as data."""
    if not isinstance(leaf, jax.Array):
        return leaf
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def check_leaf(wanted: Any, found: Any, where: str) -> None:
    """Raises Different unless a leaf came back as it was."""
    cls = np.ndarray if isinstance(wanted, np.memmap) else type(wanted)
    if type(found) is not cls:
        raise Different(
            f"{where}: a {cls.__name__} came back as a {type(found).__name__} {found!r}"
        )
    if isinstance(wanted, jax.Array):
        _check_jax(wanted, found, where)
    elif isinstance(wanted, np.ndarray | np.generic):
        _check_numpy(wanted, found, where)
    elif _exactly(wanted) != _exactly(found):
        raise Different(f"{where}: {wanted!r} came back as {found!r}")


def _exactly(value: Any) -> Any:
    """Returns what is equal only for a value that is the same: a NaN, a zero below zero."""
    return value if isinstance(value, int) else repr(value)


def _check_numpy(wanted: Any, found: Any, where: str) -> None:
    if wanted.dtype != found.dtype or wanted.shape != found.shape:
        raise Different(f"{where}: {wanted!r} came back as {found!r}")
    if wanted.dtype.char in "gG":  # numbers with unused bytes
        is_equal = np.array_equal(wanted, found, equal_nan=True)
    elif wanted.dtype.fields is None:
        is_equal = wanted.tobytes() == found.tobytes()
    else:  # whose padding is anything
        is_equal = bool(np.all(wanted == found))
    if not is_equal:
        raise Different(f"{where}: {wanted!r} came back as {found!r}")


def _check_jax(wanted: jax.Array, found: jax.Array, where: str) -> None:
    if wanted.dtype != found.dtype:
        raise Different(f"{where}: {wanted.dtype} came back as {found.dtype}")
    weak, weak_back = (
        getattr(array, "weak_type", None) for array in (wanted, found)
    )  # no key has it
    if weak != weak_back:
        raise Different(f"{where}: weak_type={weak} came back as {weak_back}")
    if wanted.committed != found.committed:
        raise Different(f"{where}: committed={wanted.committed} came back as {found.committed}")
    if wanted.committed and not is_same_place(wanted.sharding, found.sharding, wanted.ndim):
        raise Different(f"{where}: {wanted.sharding} came back as {found.sharding}")
    _check_numpy(host_leaf(wanted), host_leaf(found), where)


def check_tree(wanted: Any, found: Any) -> None:
    """Raises Different unless a tree came back as it was, node by node and leaf by leaf."""
    leaves, treedef = jax.tree_util.tree_flatten(wanted)
    back, treedef_back = jax.tree_util.tree_flatten(found)
    if not is_same_structure(treedef, treedef_back):
        raise Different(f"the tree {treedef} came back as {treedef_back}")
    for number, (leaf, leaf_back) in enumerate(zip(leaves, back, strict=True)):
        check_leaf(leaf, leaf_back, f"leaf {number}")


def is_same_structure(one: Any, other: Any) -> bool:
    """Compares treedefs; static data that cannot be compared are taken for equal."""
    try:
        return bool(one == other)
    except ValueError:
        return True


def check_without_like(wanted: Any, found: Any, *, plain: bool, on_devices: bool) -> None:
    """Raises Different unless a tree came back as it does of its record alone."""
    if plain:
        wanted = _plain(wanted)
    _check_nodes(wanted, found, plain=plain, where="the tree")
    leaves = jax.tree_util.tree_leaves(wanted)
    back = jax.tree_util.tree_leaves(found)
    for number, (leaf, leaf_back) in enumerate(zip(leaves, back, strict=True)):
        check_leaf(leaf if on_devices else host_leaf(leaf), leaf_back, f"leaf {number}")


def _plain(tree: Any) -> Any:
    """Returns a tree of dicts and lists, as a reader has it that knows no class."""
    if tree is None or jax.tree_util.all_leaves([tree]):
        return tree
    if type(tree) in (list, tuple):
        return type(tree)(map(_plain, tree))
    children = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)[0]
    fields = {_key(path[0]): _plain(child) for path, child in children}
    if isinstance(tree, OrderedDict):
        return OrderedDict(fields)
    if (
        type(tree) not in (dict, defaultdict)
        and fields
        and list(fields) == list(range(len(fields)))
    ):
        return list(fields.values())
    return fields


def _key(entry: Any) -> Any:
    for name in ("key", "idx", "name"):
        if hasattr(entry, name):
            return getattr(entry, name)
    return str(entry)


def _check_nodes(wanted: Any, found: Any, *, plain: bool, where: str) -> None:
    pairs: Any
    cls = dict if type(wanted).__name__ == "defaultdict" else type(wanted)
    if isinstance(wanted, dict) and cls.__module__ in ("builtins", "collections"):
        if type(found) is not cls or list(found) != list(found):
            raise Different(f"{where}: {wanted!r} came back as {found!r}")
        if set(wanted) != set(found) or {*map(type, wanted)} - {*map(type, found)}:
            raise Different(f"{where}: the keys {[*wanted]} came back as {[*found]}")
        pairs = [(value, found[key], key) for key, value in wanted.items()]
    elif type(wanted) in (list, tuple):
        if type(found) is not type(wanted) or len(found) != len(wanted):
            raise Different(f"{where}: {wanted!r} came back as {found!r}")
        pairs = zip(wanted, found, range(len(wanted)), strict=True)
    elif jax.tree_util.all_leaves([wanted]) or wanted is None:
        return
    elif isinstance(wanted, tuple):
        if not plain and (not isinstance(found, tuple) or len(found) != len(wanted)):
            raise Different(f"{where}: {wanted!r} came back as {found!r}")
        return
    else:
        if not plain and not isinstance(found, Node):
            raise Different(f"{where}: {wanted!r} came back as {found!r}, expected a Node")
        return
    for inner, inner_back, key in pairs:
        _check_nodes(inner, inner_back, plain=plain, where=f"{where}[{key!r}]")


def check_state(wanted: Any, found: Any, where: str = "the state") -> None:
    """Raises Different unless any value came back equal and of the same types."""
    if isinstance(wanted, jax.Array) and isinstance(found, jax.Array):
        # A state says nothing of devices.
        check_leaf(host_leaf(wanted), host_leaf(found), where)
        if wanted.weak_type != found.weak_type:
            raise Different(f"{where}: {wanted.aval} came back as {found.aval}")
        return
    if isinstance(wanted, np.ndarray | np.generic):
        check_leaf(wanted, found, where)
        return
    if type(found) is not type(wanted):
        raise Different(f"{where}: {wanted!r} came back as {found!r}")
    if isinstance(wanted, dict):
        if [(type(key), _exactly(key)) for key in wanted] != [
            (type(key), _exactly(key)) for key in found
        ]:
            raise Different(f"{where}: the keys {[*wanted]} came back as {[*found]}")
        for key, value, value_back in zip(wanted, wanted.values(), found.values(), strict=True):
            check_state(value, value_back, f"{where}[{key!r}]")
    elif isinstance(wanted, list | tuple):
        if len(wanted) != len(found):
            raise Different(f"{where}: {wanted!r} came back as {found!r}")
        for index, (value, value_back) in enumerate(zip(wanted, found, strict=True)):
            check_state(value, value_back, f"{where}[{index}]")
    elif _exactly(wanted) != _exactly(found):
        raise Different(f"{where}: {wanted!r} came back as {found!r}")


def check_json(wanted: Any, found: Any, where: str = "the value") -> None:
    """Raises Different unless a value came back as JSON has it: a tuple as a list, numbers of numpy
    as numbers.
    """
    if isinstance(wanted, np.generic) and isinstance(wanted.item(), bool | int | float):
        wanted = wanted.item()
    if isinstance(wanted, dict) and type(found) is dict and len(wanted) == len(found):
        for (key, value), (key_back, value_back) in zip(wanted.items(), found.items(), strict=True):
            if not isinstance(key, str) or key != key_back:
                raise Different(f"{where}: the key {key!r} came back as {key_back!r}")
            check_json(value, value_back, f"{where}[{key!r}]")
    elif isinstance(wanted, list | tuple) and type(found) is list and len(wanted) == len(found):
        for index, (value, value_back) in enumerate(zip(wanted, found, strict=True)):
            check_json(value, value_back, f"{where}[{index}]")
    else:
        plain = next((cls for cls in (bool, int, float, str) if isinstance(wanted, cls)), None)
        if plain is None:
            is_same = wanted is None and found is None
        else:
            # An enumeration of ints or texts is its value in JSON.
            is_same = type(found) is plain and _exactly(plain(wanted)) == _exactly(found)
        if not is_same:
            raise Different(f"{where}: {wanted!r} came back as {found!r}")
