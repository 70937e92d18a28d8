"""The ways in which a saved tree comes back, and what has to come back then."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from holdfast.checkpoint import SAVED, TreeMismatch
from holdfast.checkpoint.format.tree import FlatTree
from holdfast.checkpoint.restoring.match import HostShapeDtypeStruct

from .casting import TARGETS, check_cast, fits, holds
from .comparing import Different, check_leaf, check_tree, check_without_like, host_leaf
from .nodes import swapped
from .places import meshes

Load = Callable[..., Any]
Describe = Callable[[], Any]


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _abstract(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        sharding = leaf.sharding if leaf.committed else None
        weak = {} if _is_key(leaf) else {"weak_type": leaf.weak_type}
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, **weak)
    if isinstance(leaf, np.generic):
        return np.zeros((), leaf.dtype)[()]
    if isinstance(leaf, np.ndarray):
        return HostShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


def none(load: Load, tree: Any, dice: random.Random) -> None:
    check_without_like(tree, load(None), plain=False, on_devices=False)


def plain(load: Load, tree: Any, dice: random.Random) -> None:
    check_without_like(tree, load(None, plain=True), plain=True, on_devices=False)


def saved(load: Load, tree: Any, dice: random.Random) -> None:
    found = load(SAVED)
    committed = jax.tree_util.tree_map(_committed, tree)
    check_without_like(committed, found, plain=False, on_devices=True)


def _committed(leaf: Any) -> Any:
    """Returns an array as SAVED has it: where it lay, and committed to it."""
    if not isinstance(leaf, jax.Array) or leaf.committed:
        return leaf
    weak = not _is_key(leaf) and leaf.weak_type
    back = jax.device_put(leaf, leaf.sharding)
    assert _is_key(leaf) or back.weak_type == weak
    return back


def like(load: Load, tree: Any, dice: random.Random) -> None:
    check_tree(tree, load(tree))


def abstract(load: Load, tree: Any, dice: random.Random) -> None:
    check_tree(tree, load(jax.tree_util.tree_map(_abstract, tree)))


def typed(load: Load, tree: Any, dice: random.Random) -> None:
    """Like what jax.eval_shape gives under the mesh on which the arrays are."""
    on = [
        leaf.sharding.mesh
        for leaf in jax.tree_util.tree_leaves(tree)
        if isinstance(leaf, jax.Array) and _is_explicit(leaf)
    ]
    if not on:
        like(load, tree, dice)
        return
    mesh = dice.choice(on)

    def describe(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and _is_explicit(leaf) and leaf.sharding.mesh == mesh:
            return jax.typeof(leaf)
        return leaf

    with jax.set_mesh(mesh):
        found = load(jax.tree_util.tree_map(describe, tree))
    check_tree(tree, found)


def _is_explicit(leaf: jax.Array) -> bool:
    sharding: Any = leaf.sharding
    is_named = isinstance(sharding, jax.sharding.NamedSharding)
    usual = jax.local_devices()[0].default_memory().kind
    return is_named and sharding.mesh.are_all_axes_explicit and sharding.memory_kind == usual


def swaps(load: Load, tree: Any, dice: random.Random) -> None:
    """Into a tree whose children by position are in another order: refused, never swapped."""
    wanted, is_other = swapped(tree)
    try:
        found = load(wanted)
    except TreeMismatch:
        if not is_other:
            raise
        return
    if is_other:
        raise Different(f"{tree!r} came back as {found!r}")
    check_tree(tree, found)


def partly(load: Load, tree: Any, dice: random.Random) -> None:
    paths = paths_of(tree)
    chosen = {path for path in paths if dice.random() < 0.5} or set(paths[:1])
    check_tree(tree, load(tree, partial=chosen.__contains__))


def renamed(load: Load, tree: Any, dice: random.Random) -> None:
    def rename(path: str) -> str:
        return "new" if path == "\\r" else f"new.{path}"

    check_tree({"new": tree}, load({"new": tree}, rename=rename))


def elsewhere(load: Load, tree: Any, dice: random.Random) -> None:
    """On another mesh, Python numbers too: as arrays that every device has."""
    sharding = jax.sharding.NamedSharding(dice.choice(meshes()), jax.sharding.PartitionSpec())

    def move(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return jax.device_put(leaf if _is_key(leaf) else np.asarray(leaf), sharding)
        if type(leaf) in (bool, int, float) and _fits_jax(leaf):
            return jax.device_put(
                np.asarray(leaf, jax.dtypes.canonicalize_dtype(type(leaf))), sharding
            )
        return leaf

    moved = jax.tree_util.tree_map(move, tree)
    check_tree(moved, load(jax.tree_util.tree_map(_abstract, moved)))


def _fits_jax(number: Any) -> bool:
    return holds(number, np.dtype(jax.dtypes.canonicalize_dtype(type(number))))


def cast(load: Load, tree: Any, dice: random.Random) -> None:
    """Into other dtypes: equal as far as they have digits for it, or refused by value."""
    leaves, treedef = jax.tree_util.tree_flatten(tree)
    targets = [dice.choice(TARGETS) if _is_number(leaf) else None for leaf in leaves]
    wanted = [
        leaf if target is None else jax.ShapeDtypeStruct(np.shape(leaf), target)
        for leaf, target in zip(leaves, targets, strict=True)
    ]
    pairs = [pair for pair in zip(leaves, targets, strict=True) if pair[1] is not None]
    may = all(_may_cast(leaf, target) for leaf, target in pairs)
    try:
        found = load(treedef.unflatten(wanted), cast=True)
    except TreeMismatch:
        if may:
            raise
        return
    if not may:
        raise Different(f"{pairs} was not refused")
    back = jax.tree_util.tree_leaves(found)
    for number, (leaf, target, leaf_back) in enumerate(zip(leaves, targets, back, strict=True)):
        if target is None:
            check_leaf(leaf, leaf_back, f"leaf {number}")
        elif isinstance(leaf_back, jax.Array) and leaf_back.dtype == target:
            wanted_array = np.asarray(host_leaf(leaf), object if type(leaf) is int else None)
            check_cast(wanted_array, np.asarray(leaf_back), f"leaf {number}")
        else:
            raise Different(f"leaf {number}: expected {target}, found {leaf_back!r}")


def _is_number(leaf: Any) -> bool:
    is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic) and not _is_key(leaf)
    return is_array or type(leaf) in (bool, int, float, complex)


def _may_cast(leaf: Any, target: np.dtype[Any]) -> bool:
    if type(leaf) in (bool, int, float, complex):
        return holds(leaf, target)
    array = host_leaf(leaf)
    if array.dtype == target:
        return True
    if array.dtype.kind == "c" and target.kind != "c":
        return False
    return all(fits(number.item(), target) for number in np.asarray(array).reshape(-1))


WAYS: Mapping[str, Callable[[Load, Any, random.Random], None]] = {
    way.__name__: way
    for way in (
        *(none, plain, saved, like, abstract, typed, swaps, partly, renamed, elsewhere, cast),
    )
}


def paths_of(tree: Any) -> list[str]:
    """Returns the paths of a tree's leaves."""
    return FlatTree.of(tree).paths
