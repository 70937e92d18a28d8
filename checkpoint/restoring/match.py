"""How saved leaves come back: each is compared with its leaf of `like`, before anything is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn

import jax
import numpy as np
from jax.sharding import Sharding

from ..arrays.dtypes import Dtype, is_weak, name_of
from ..arrays.ranges import holds, is_whole
from ..arrays.sharding import concrete_sharding, make_sharding, show_sharding
from ..errors import TreeMismatch, leaf_at
from ..format.grid import Shape
from ..format.likely_names import likely_renames, saved_leaves, wanted_leaves
from ..format.limits import shown
from ..format.record import ItemRecord, LeafRecord
from ..format.static_data import are_alike, show_static_data
from ..format.tree import VALUE_TYPES, FlatTree, describe, is_key, type_name

LISTED = 5  # leaves that a message names

_PYTHON_KINDS = {"b": bool, "c": complex}


class _Saved:
    def __repr__(self) -> str:
        return "SAVED"


SAVED: Final = _Saved()  # a `like`: the saved shardings, on this job's devices


class HostShapeDtypeStruct(jax.ShapeDtypeStruct):
    """Describes a leaf that comes back as numpy: an array, or a scalar where one was saved."""


class LeafRequest(NamedTuple):
    """A request for one leaf, as "numpy", "scalar", "jax" or a Python "value".

    "jax" is with a sharding, or None: where jax puts it. `weak`: of a weak type.
    """

    leaf: LeafRecord
    form: str
    dtype: Dtype | None = None  # where it differs from the saved one
    sharding: Sharding | None = None
    weak: bool = False


def check_paths(item: ItemRecord, wanted: Sequence[str], like: FlatTree, *, strict: bool) -> None:
    """Raises TreeMismatch, which lists the `wanted` leaves of a `like` that were not saved.

    If strict, it lists the saved ones that are not wanted, too.
    """
    saved = {leaf.path for leaf in item.leaves}
    asked = set(wanted)
    if saved == asked or (not strict and asked <= saved):
        return
    missing = [path for path in wanted if path not in saved]
    unexpected = [leaf.path for leaf in item.leaves if leaf.path not in asked] if strict else []
    lines = []
    if missing:
        lines.append(f"{_count(missing)} of `like` not in the checkpoint: {listed(missing)}")
    if unexpected:
        lines.append(
            f"{_count(unexpected)} of the checkpoint not in `like`: {listed(unexpected)}"
            " (partial=True leaves them out)"
        )
    lost = set(missing)
    pairs = likely_renames(
        [leaf for leaf in wanted_leaves(like) if leaf.path in lost],
        [leaf for leaf in saved_leaves(item) if leaf.path not in asked],
    )
    if pairs:
        more = " and so on" if len(missing) > len(pairs) else ""
        lines.append(f"for what was renamed pass rename={pairs}{more}")
    raise TreeMismatch(
        f"item {item.name!r}: " + "; ".join(lines),
        leaf=(missing or unexpected)[0],
        expected="a leaf" if missing else "none",
        found="none" if missing else "a leaf",
    )


def check_not_only_none(item: ItemRecord, like: Any) -> None:
    """Raises TreeMismatch where a `like` without leaves has None in place of saved ones."""
    marked = jax.tree_util.tree_map(
        lambda leaf: 0 if leaf is None else leaf, like, is_leaf=lambda leaf: leaf is None
    )
    nones = describe(marked)[1]
    lost = [
        leaf.path for leaf in item.leaves if any(_is_below(f"{leaf.path}.", path) for path in nones)
    ]
    if lost:
        raise TreeMismatch(
            f"item {item.name!r}: `like` has None in place of {listed(lost)}, and no leaf: None is"
            " no leaf, as in all of jax, so nothing would be restored. For numpy leave `like` out;"
            f" partial=lambda path: path == {lost[0]!r} chooses leaves then",
            leaf=lost[0],
            expected="None",
            found="a leaf",
        )


def check_statics(item: ItemRecord, wanted: Mapping[str, Any], paths: Sequence[str]) -> None:
    """Raises TreeMismatch where a node of `like` has its children by position, and other static
    data than the saved one: a position may mean another child. `paths` are the wanted leaves.
    """
    for node, data in wanted.items():
        saved = item.statics.get(node)
        if are_alike(data, saved) or not any(_is_below(path, node) for path in paths):
            continue
        expected = show_static_data(data)
        found = show_static_data(saved)
        raise TreeMismatch(
            f"item {item.name!r}: the children of {node or 'the root'!r} go by their positions, and"
            f" its static data were expected as {expected}, the checkpoint has {found}; make `like`"
            " as the tree was that was saved, or say by rename= which leaf is which",
            leaf=node,
            expected=expected,
            found=found,
        )


def _is_below(path: str, node: str) -> bool:
    return not node or path.startswith(f"{node}.")


def check_leaf_types(item: ItemRecord, leaves: Sequence[Any], paths: Sequence[str]) -> None:
    """Raises TreeMismatch where a leaf of `like` was of a leaf type that is not registered here."""
    for leaf, path in zip(leaves, paths, strict=True):
        if type(leaf) in VALUE_TYPES or hasattr(leaf, "dtype"):
            continue
        if not any(saved.path.startswith(f"{path}.") for saved in item.leaves):
            continue
        raise TreeMismatch(
            f"item {item.name!r}: {leaf_at(path)} of `like` is a {type_name(type(leaf))}, and"
            " saved as a tree; register its class as it was registered when it was saved:"
            " register_leaf_type(cls, to_fields, from_fields)",
            leaf=path,
            expected=type_name(type(leaf)),
            found="a tree",
        )


def _count(paths: Sequence[str]) -> str:
    return "1 leaf" if len(paths) == 1 else f"{len(paths)} leaves"


def listed(paths: Sequence[str]) -> str:
    """Returns the first leaves by name, and how many more there are."""
    named = ", ".join(map(repr, paths[:LISTED]))
    return f"{named} and {len(paths) - LISTED} more" if len(paths) > LISTED else named


def request_as_saved(leaf: LeafRecord, *, on_devices: bool) -> LeafRequest:
    """Returns the request for a leaf without a `like`: as numpy, or with its saved sharding."""
    _check_is_there(leaf)
    if leaf.grid is None:
        return LeafRequest(leaf, "value")
    if not on_devices or leaf.kind in ("numpy", "scalar"):
        return LeafRequest(leaf, "scalar" if leaf.kind == "scalar" else "numpy")
    _check_width(leaf, leaf.numpy_dtype)
    return LeafRequest(leaf, "jax", sharding=saved_sharding(leaf), weak=leaf.weak)


def _check_is_there(leaf: LeafRecord) -> None:
    expected = "this process's copy"
    found = "copies of other processes"
    if leaf.kind == "unreadable":
        expected = "a dtype of numpy's"
        found = leaf.impl
    if leaf.refusal:
        raise TreeMismatch(leaf.refusal, leaf=leaf.path, expected=expected, found=found)


def _check_width(leaf: LeafRecord, dtype: Dtype) -> None:
    if dtype.itemsize >= 8 and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise TreeMismatch(
            f"{leaf_at(leaf.path)} is wanted as a jax.Array of {dtype.name}, which jax has only"
            " with jax_enable_x64; ask for numpy",
            leaf=leaf.path,
            expected=dtype.name,
            found=show_leaf(leaf),
        )


def saved_sharding(leaf: LeafRecord) -> Sharding | None:
    """Returns a leaf's saved sharding on the devices of this job.

    Raises TreeMismatch where they do not fit.
    """
    description = leaf.sharding
    if description is None:
        return None
    try:
        return make_sharding(description)
    except (KeyError, TypeError, ValueError) as error:
        shown = show_sharding(description)
        found = f"{jax.device_count()} devices"
        raise TreeMismatch(
            f"the saved sharding of {leaf.path!r} ({shown}) does not fit this job's {found}; pass a"
            " `like` with shardings",
            leaf=leaf.path,
            expected=shown,
            found=found,
        ) from error


def match_leaves(
    leaves: Sequence[LeafRecord], likes: Sequence[Any], *, cast: bool
) -> list[LeafRequest]:
    """Returns the requests for saved leaves that are to be like others, in pairs.

    Raises TreeMismatch, which tells the first that does not fit, and how many more do not.
    """
    requests = []
    misfits = []
    for leaf, like in zip(leaves, likes, strict=True):
        try:
            requests.append(match_leaf(leaf, like, cast))
        except TreeMismatch as error:
            misfits.append(error)
    if not misfits:
        return requests
    first, *others = misfits
    if not others:
        raise first
    verb = "does" if len(others) == 1 else "do"
    raise TreeMismatch(
        f"{first}; {len(others)} more of {len(leaves)} leaves {verb} not fit",
        leaf=first.leaf,
        expected=first.expected,
        found=first.found,
    )


def match_leaf(leaf: LeafRecord, like: Any, cast: bool) -> LeafRequest:
    """Returns the request for a saved leaf that is to be like `like`.

    Raises TreeMismatch, which names the path, both shapes and both dtypes.
    """
    _check_is_there(leaf)
    if type(like) in VALUE_TYPES:
        return _match_value(leaf, like)
    shape = getattr(like, "shape", None)
    dtype = getattr(like, "dtype", None)
    if shape is None or dtype is None:
        struct = f"; write jax.ShapeDtypeStruct({leaf.shape}, {leaf.dtype!r}, sharding=...)"
        refuse(leaf, f"a {type(like).__name__}", struct if leaf.dtype else "")
    sharding = _wanted_sharding(leaf, like)
    if leaf.per_process and not getattr(sharding, "is_fully_addressable", True):
        refuse(leaf, "one array of several processes, though each keeps its own")
    if not isinstance(dtype, np.dtype) and is_key(like):
        return _match_key(leaf, like, sharding)
    dtype = np.dtype(dtype)
    name = name_of(dtype)
    if leaf.grid is None:
        _check_value(leaf, shape, dtype)
    elif (
        leaf.kind == "key"
        or shape != leaf.shape
        or (leaf.dtype != name and not (cast and _can_cast(leaf, dtype)))
    ):
        refuse(leaf, f"{name}{list(shape)}", _remedy(leaf, shape, dtype))
    changed = None if leaf.dtype == name else dtype
    if isinstance(like, HostShapeDtypeStruct):
        return LeafRequest(leaf, "scalar" if leaf.kind == "scalar" else "numpy", changed)
    if isinstance(like, np.ndarray):
        return LeafRequest(leaf, "numpy", changed)
    if isinstance(like, np.generic):
        return LeafRequest(leaf, "scalar", changed)
    _check_width(leaf, dtype)
    return LeafRequest(leaf, "jax", changed, sharding, is_weak(like))


def _check_value(leaf: LeafRecord, shape: Shape, dtype: Dtype) -> None:
    """Raises TreeMismatch unless a saved Python value may come back as an array."""
    # An int goes by value, whatever the sign of the dtype.
    is_number = leaf.kind in ("bool", "int") or (
        leaf.kind in ("float", "complex") and np.can_cast(type(leaf.value), dtype, "same_kind")
    )
    if shape or not is_number:
        refuse(leaf, f"{name_of(dtype)}{list(shape)}")
    if not holds(dtype, leaf.value):
        refuse(leaf, f"{name_of(dtype)}[], which cannot hold {shown(leaf.value)}")


def _can_cast(leaf: LeafRecord, dtype: Dtype) -> bool:
    return leaf.numpy_dtype.kind != "c" or dtype.kind == "c"


def _remedy(leaf: LeafRecord, shape: Shape, dtype: Dtype) -> str:
    """Returns what the caller can do about an array of another shape or dtype, or ""."""
    if leaf.kind == "key":
        return ""
    if shape != leaf.shape:
        return (
            "; change the shape, or keep the leaf of `like` with"
            f" partial=lambda path: path != {leaf.path!r}"
        )
    return "; cast=True converts it" if _can_cast(leaf, dtype) else ""


def refuse(leaf: LeafRecord, expected: str, remedy: str = "") -> NoReturn:
    """Raises TreeMismatch: the caller expected something else."""
    found = show_leaf(leaf)
    raise TreeMismatch(
        f"{leaf_at(leaf.path)} was expected as {expected}, the checkpoint has {found}{remedy}",
        leaf=leaf.path,
        expected=expected,
        found=found,
    )


def _match_value(leaf: LeafRecord, like: Any) -> LeafRequest:
    kind = type(like)
    if leaf.grid is None:
        fits = leaf.kind == kind.__name__
    else:
        dtype = leaf.numpy_dtype
        saved = _PYTHON_KINDS.get(dtype.kind, int if is_whole(dtype) else float)
        fits = leaf.shape == () and leaf.kind != "key" and saved is kind
    if not fits:
        refuse(leaf, f"a Python {kind.__name__}")
    return LeafRequest(leaf, "value")


def _match_key(leaf: LeafRecord, like: Any, sharding: Sharding | None) -> LeafRequest:
    impl = str(jax.random.key_impl(like)) if isinstance(like, jax.Array) else like.dtype._impl.name
    if leaf.kind != "key" or leaf.impl != impl or leaf.shape[:-1] != tuple(like.shape):
        refuse(leaf, f"key<{impl}>{list(like.shape)}")
    if isinstance(like, jax.Array):
        sharding = _sharding_of(jax.random.key_data(like))
    return LeafRequest(leaf, "jax", sharding=sharding)


def _wanted_sharding(leaf: LeafRecord, like: Any) -> Sharding | None:
    try:
        return _sharding_of(like)
    except (TypeError, ValueError) as error:
        raise TreeMismatch(
            f"{leaf_at(leaf.path)} of `like` has no devices to lie on: {error}",
            leaf=leaf.path,
            expected="devices",
            found="an abstract sharding",
        ) from error


def _sharding_of(like: Any) -> Sharding | None:
    """Returns where a leaf is to lie; None, where jax puts what is not committed.

    Raises TypeError or ValueError where that is on a mesh that is not set.
    """
    sharding = getattr(like, "sharding", None)
    if not isinstance(sharding, Sharding) or not getattr(like, "committed", True):
        return None
    return concrete_sharding(sharding)


def spans_processes(like: Any) -> bool:
    """Says whether a `like` has arrays of several processes, by their shardings.

    SAVED has them in a job of several.
    """
    if like is SAVED:
        return bool(jax.process_count() > 1)
    return any(map(_spans_processes, jax.tree_util.tree_leaves(like)))


def _spans_processes(leaf: Any) -> bool:
    try:
        sharding = _sharding_of(leaf)
    except (TypeError, ValueError):  # it is refused when it is matched, by its path
        return False
    return sharding is not None and not sharding.is_fully_addressable


def show_leaf(leaf: LeafRecord) -> str:
    """Returns dtype and shape, or the type of a value, for people."""
    if leaf.grid is None:
        return f"a Python {leaf.kind}"
    if leaf.kind == "key":
        return f"key<{leaf.impl}>{list(leaf.shape[:-1])}"
    if leaf.kind == "unreadable":
        return f"{leaf.impl}[{leaf.nbytes} bytes]"
    return f"{leaf.dtype}{list(leaf.shape)}"
