"""Where drawn values go, and how they come back from there."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from hypothesis import strategies as st

from holdfast.checkpoint import (
    CheckpointManager,
    Json,
    SaveFailed,
    UnsupportedLeaf,
    convert,
    load,
    save,
    structure,
)
from holdfast.checkpoint.format.tree import flatten, plain_name

from ...support.failed_arrays import failed_array, forget_failures
from .comparing import Different, check_json, check_leaf, check_state, check_tree, host_leaf
from .contexts import CONTEXTS
from .nodes import may_not_be_refused, metrics, states, trees
from .refusals import check_refusal, check_typed
from .ways import WAYS, paths_of


class Iterator:
    """An iterator of somebody else, whose state is anything."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


class Draw(NamedTuple):
    """A value, where it goes, how it comes back, and what that chooses by."""

    where: str
    value: Any
    way: str = ""
    context: str = "none"
    dice: int = 0

    @classmethod
    def strategy(cls, to: Collection[str] = ()) -> st.SearchStrategy[Self]:
        """Draws any, or what goes to some of the destinations."""
        dice = st.integers(0, 2**16)
        contexts = st.one_of(st.just("none"), st.sampled_from(sorted(CONTEXTS)))
        ways = st.sampled_from(sorted(WAYS))
        no_way = st.just("")
        kinds = [
            *[(name, trees(), ways) for name in _TREES] * 2,
            *((name, states(), no_way) for name in _STATES),
            ("metrics", metrics(), no_way),
            ("failed", trees(), no_way),
        ]
        return st.one_of(
            st.builds(cls, where=st.just(name), value=values, way=way, context=contexts, dice=dice)
            for name, values, way in kinds
            if not to or name in to
        )


def check(draw: Draw, folder: Path) -> None:
    """Raises Different where what comes back is not what went in, or a refusal is none."""
    if draw.where in _TREES:
        _check_tree(draw, folder)
        return
    if draw.where == "failed":
        _check_failed(draw, folder)
        return
    with CONTEXTS[draw.context]():
        if draw.where == "metrics":
            _check_metrics(draw, folder)
        else:
            _STATES[draw.where](draw, folder)


def _refused(folder: Path, put: Callable[[], Any]) -> bool:
    try:
        put()
    except Exception as error:
        check_refusal(error, folder)
        return True
    return False


class _Destination(NamedTuple):
    """A place for trees. `put` returns how to load from it; `keeps_all` says whether what a tree
    may hold may not be refused, `flat` whether only arrays come back, by their names, and
    `needs_like` that the place keeps leaves, and few of the nodes.
    """

    put: Callable[[Path, Any], Callable[..., Any]]
    keeps_all: bool = False
    flat: bool = False
    needs_like: bool = False


def _to_holdfast(folder: Path, tree: Any) -> Callable[..., Any]:
    save(folder / "one", tree)
    return lambda like, **how: load(folder / "one", like, **how)


def _to_manager(folder: Path, tree: Any) -> Callable[..., Any]:
    with CheckpointManager(folder / "root") as manager:
        manager.save(3, tree)

    def back(like: Any, **how: Any) -> Any:
        with CheckpointManager(folder / "root") as reader:
            return reader.restore(like=like, **how)

    return back


def _to_orbax(folder: Path, tree: Any) -> Callable[..., Any]:
    save(folder / "orbax", tree, layout="orbax")
    return lambda like, **how: load(folder / "orbax", like, item="default", **how)


def _converted(layout: str) -> Callable[[Path, Any], Callable[..., Any]]:
    def put(folder: Path, tree: Any) -> Callable[..., Any]:
        save(folder / "one", tree)
        try:
            there = convert(folder / "one", folder / layout, layout)
        except Exception as error:
            check_refusal(error, folder / layout)
            return lambda like, **how: load(folder / "one", like, **how)
        if layout == "holdfast":
            return lambda like, **how: load(there, like, **how)
        back = convert(there, folder / "back")
        return lambda like, **how: load(back, like, **how)

    return put


_TREES = {
    "holdfast": _Destination(_to_holdfast, keeps_all=True),
    "manager": _Destination(_to_manager, keeps_all=True),
    "orbax": _Destination(_to_orbax, needs_like=True),
    "converted": _Destination(_converted("holdfast"), keeps_all=True),
    "through orbax": _Destination(_converted("orbax"), keeps_all=True, needs_like=True),
    "safetensors": _Destination(_to_holdfast, keeps_all=True, flat=True),
}


def _check_tree(draw: Draw, folder: Path) -> None:
    destination = _TREES[draw.where]
    context = CONTEXTS[draw.context]
    back: Callable[..., Any] | None = None

    def put() -> None:
        nonlocal back
        with context():
            back = destination.put(folder, draw.value)

    if _refused(folder, put):
        if destination.keeps_all and draw.value is not None and may_not_be_refused(draw.value):
            raise Different(f"{draw.value!r} was refused")
        return
    assert back is not None
    if destination.flat:
        _check_safetensors(draw.value, folder)
        return
    way = draw.way
    if destination.needs_like and way in ("none", "plain", "saved", "swaps"):
        way = "like"
    put_back = back

    def load_within(like: Any, **how: Any) -> Any:
        # The mesh of a way is the inner one.
        mesh = jax.sharding.get_mesh()
        with context(), contextlib.nullcontext() if mesh.empty else jax.set_mesh(mesh):
            return put_back(like, **how)

    WAYS[way](load_within, draw.value, random.Random(draw.dice))


def _check_failed(draw: Draw, folder: Path) -> None:
    """One leaf is an array whose computation fails: the save does, with its name."""
    try:
        leaves, treedef = flatten(draw.value)
    except UnsupportedLeaf:  # no state at all, which is for the other destinations
        return
    place = draw.dice % (len(leaves) + 1)
    failed = failed_array()
    tree: Any
    if place < len(leaves):
        tree = treedef.unflatten([*leaves[:place], failed, *leaves[place + 1 :]])
    else:
        tree = {"tree": draw.value, "failed": failed}
    try:
        with CONTEXTS[draw.context]():
            if draw.dice // 7 % 2:
                save(folder / "one", tree, step=3)
            else:
                _to_manager(folder, tree)
    except SaveFailed as error:
        if not error.leaf:
            raise Different(f"no leaf is named: {error!r}") from error
        left = [*folder.rglob("checkpoint.json")]
        if left or error.step != 3 or repr(error.leaf) not in str(error):
            raise Different(f"leaf {error.leaf}, step {error.step}, {left}: {error!r}") from error
    except Exception as error:
        check_refusal(error, folder)
    else:
        raise Different("a state with an array that does not exist was saved")
    finally:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            failed.block_until_ready()  # jax aborts a process that ends before its computations
        forget_failures()


def _check_safetensors(tree: Any, folder: Path) -> None:
    arrays = {}
    names = [plain_name(path) for path in paths_of(tree)]
    is_flat = type(tree) is dict and jax.tree_util.all_leaves(tree.values())
    if is_flat:  # then names are keys, whatever is in them
        names = [str(key) for key in sorted(tree)]
    for name, leaf in zip(names, jax.tree_util.tree_leaves(tree), strict=True):
        if type(leaf) in (float, complex):
            leaf = type(leaf)(repr(leaf))  # all NaNs of Python are one
        if not isinstance(leaf, str | bytes):
            arrays[name] = np.asarray(host_leaf(leaf))
    try:
        there = convert(folder / "one", folder / "flat", "safetensors")
    except Exception as error:
        check_refusal(error, folder / "flat")
        if is_flat and "two leaves" in str(error):
            raise Different(f"the names {names} were taken for the same") from error
        return
    found = load(there)
    if set(found) != set(arrays):
        raise Different(f"the arrays {sorted(arrays)} came back as {sorted(found)}")
    for name, array in arrays.items():
        check_leaf(array, found[name], name)
    check_tree(found, load(there, found))
    check_tree(found, load(convert(there, folder / "back")))


def _check_metrics(draw: Draw, folder: Path) -> None:
    root = folder / "root"

    def put() -> None:
        with CheckpointManager(root) as manager:
            manager.save(1, {"w": np.ones(1)}, metrics=draw.value)

    if _refused(folder, put):
        return
    with CheckpointManager(root) as manager:
        found = manager.metrics(1)
    wanted = draw.value or {}
    if set(found) != set(wanted) or not all(type(name) is str for name in found):
        raise Different(f"the metrics {wanted!r} came back as {found!r}")
    for name, value in wanted.items():
        number = found[name]
        if isinstance(value, str) or repr(float(value)) != repr(float(number)):
            raise Different(f"the metric {name!r}, {value!r}, came back as {number!r}")
    described = structure(root, 1)
    for name, number in described.metrics.items():
        if not math.isclose(number, found[name]) and repr(number) != repr(found[name]):
            raise Different(f"the metric {name!r} is {number!r} in the structure")


def _check_iterator(draw: Draw, folder: Path) -> None:
    path = folder / "one"
    if _refused(folder, lambda: save(path, items={"data": Iterator(draw.value)})):
        return
    check_state(draw.value, load(path, Iterator(), item="data").state)


def _check_json_item(draw: Draw, folder: Path) -> None:
    path = folder / "one"
    if _refused(folder, lambda: save(path, items={"extra": Json(draw.value)})):
        return
    check_json(draw.value, load(path, item="extra"))


def _check_metadata(draw: Draw, folder: Path) -> None:
    path = folder / "one"
    if _refused(folder, lambda: save(path, {"w": np.ones(1)}, metadata=draw.value)):
        return
    check_json(draw.value, structure(path).metadata)
    for layout in ("orbax", "safetensors"):
        try:
            there = convert(path, folder / layout, layout)
        except Exception as error:
            check_typed(error)
            continue
        if layout == "orbax":
            _check_orbax(draw.value, structure(there).metadata)


def _check_orbax_metadata(draw: Draw, folder: Path) -> None:
    path = folder / "orbax"
    put = {"w": np.ones(1)}
    if _refused(folder, lambda: save(path, put, layout="orbax", metadata=draw.value)):
        return
    _check_orbax(draw.value, structure(path).metadata)


def _check_orbax(wanted: Any, found: Any) -> None:
    check_json(wanted or None, found)  # it has no metadata where they are empty


_STATES: dict[str, Callable[[Draw, Path], None]] = {
    "iterator": _check_iterator,
    "JSON": _check_json_item,
    "metadata": _check_metadata,
    "metadata of orbax": _check_orbax_metadata,
}
