"""Makes plans of trees of arrays, and keeps the last ones: reads from jax what a plan needs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.tree_util import PyTreeDef

from ..arrays.dtypes import Dtype, can_store, is_weak, name_of
from ..arrays.sharding import axes_of, describe_sharding, refuse_partial_sums, spec_of_axes
from ..errors import UnsupportedLeaf, leaf_at
from ..format.grid import Shape
from ..format.json_state import Json
from ..format.own_files import Files
from ..format.tree import VALUE_TYPES, FlatTree, is_key, paused_gc, stored_form, type_name
from .plan import Leaf, Plan, ShardPlacement, make_plan
from .record_builder import check_plan

CACHED_PLANS = 8


class _CachedPlan(NamedTuple):
    treedef: PyTreeDef
    signatures: list[tuple[type, Any, Any]]
    leaving: frozenset[int]
    plan: Plan


class Planner:
    """Makes the plans of a manager's saves, and caches them. For one thread at a time.

    A plan is kept by (treedef, avals, shardings, ranks that leave).
    `index` and `count` are the group's; `processes[rank]` is the runtime index of each member
    (default: range(count)). Plans depend on `max_file_bytes` (the store's) too, so all processes
    pass the same. `per_process` says of a leaf's path whether each keeps its own.
    """

    def __init__(
        self,
        index: int = 0,
        count: int = 1,
        *,
        processes: Sequence[int] | None = None,
        max_file_bytes: int | None = None,
        per_process: Callable[[str], bool] | None = None,
    ) -> None:
        self._index = index
        self._count = count
        self._max_file_bytes = max_file_bytes
        self._per_process = per_process
        members = range(count) if processes is None else processes
        self._ranks = {process: rank for rank, process in enumerate(members)}
        self._cached: list[_CachedPlan] = []
        self._placements: dict[tuple[Sharding, Shape], tuple[ShardPlacement, Any]] = {}
        self._describe = functools.cache(describe_sharding)
        self._leaving: frozenset[int] = frozenset()

    def plan(self, tree: FlatTree, leaving: Collection[int] = ()) -> Plan:
        """Returns the plan of a tree; raises UnsupportedLeaf naming the leaf's path and what to do.

        Ranks that are `leaving` write only what no other rank holds.
        """
        leave = frozenset(leaving)
        for cached in self._cached:
            is_alike = cached.leaving == leave and _same_structure(cached.treedef, tree.treedef)
            if is_alike and _same(cached.signatures, tree.leaves):
                return cached.plan
        with paused_gc():
            plan = self._make(tree, leave)
            signatures = [_signature(leaf) for leaf in tree.leaves]
            newest = _CachedPlan(tree.treedef, signatures, leave, plan)
            self._cached = [newest, *self._cached[: CACHED_PLANS - 1]]
        return plan

    def _make(self, tree: FlatTree, leaving: frozenset[int]) -> Plan:
        self._placements = {}
        self._describe = functools.cache(describe_sharding)
        self._leaving = leaving
        described = [
            self._leaf(path, leaf) for path, leaf in zip(tree.paths, tree.leaves, strict=True)
        ]
        plan = make_plan(
            tree.description,
            described,
            self._index,
            self._count,
            statics=tree.statics,
            max_file_bytes=self._max_file_bytes,
        )
        check_plan(plan)
        return plan

    def _leaf(self, path: str, leaf: Any) -> Leaf:
        per_process = self._per_process is not None and self._per_process(path)
        check_leaf(path, leaf)
        if isinstance(leaf, jax.Array):
            described = self._jax_leaf(path, leaf, local=per_process or self._count > 1)
        else:
            described = _host_leaf(path, leaf)
        return self._kept_per_process(described) if per_process else described

    def _kept_per_process(self, leaf: Leaf) -> Leaf:
        """Returns a leaf of which every process writes its own."""
        if leaf.is_value:
            return replace(leaf, per_process=True)
        if leaf.placement is not None:
            raise UnsupportedLeaf(
                f"{leaf_at(leaf.path)} is one array of several processes, and cannot be kept per"
                " process; leave it out of per_process",
                leaf=leaf.path,
                found=str(leaf.sharding),
            )
        rows = row_placement(self._count, len(leaf.shape))
        return replace(leaf, shape=(self._count, *leaf.shape), placement=rows, per_process=True)

    def _jax_leaf(self, path: str, leaf: jax.Array, *, local: bool) -> Leaf:
        kind, impl, leaf = stored_form(leaf)
        placement = sharding = None
        if not local or not leaf.is_fully_addressable:
            placement, sharding = self._placement(path, leaf)
        dtype = np.dtype(leaf.dtype)
        return Leaf(
            path,
            kind,
            name_of(dtype),
            leaf.shape,
            itemsize=dtype.itemsize,
            placement=placement,
            sharding=sharding,
            impl=impl,
            weak=is_weak(leaf),
        )

    def _placement(self, path: str, leaf: jax.Array) -> tuple[ShardPlacement, Any]:
        """Returns the placement and the description of a leaf's sharding.

        They are made once for all leaves of that shape and sharding.
        """
        key = (leaf.sharding, leaf.shape)
        if key not in self._placements:
            placement = self._place(path, leaf)
            self._placements[key] = (placement, self._describe(leaf.sharding, leaf.ndim))
        return self._placements[key]

    def _place(self, path: str, leaf: jax.Array) -> ShardPlacement:
        placement = placement_of(leaf, self._ranks)
        if (placement.holders[1] == 0).any():
            raise UnsupportedLeaf(
                f"shards of {leaf_at(path)} are on processes outside of this group; save it"
                " with a group that holds all of it",
                leaf=path,
                found=str(leaf.sharding),
            )
        return placement.without(self._leaving) if self._leaving else placement


def _host_leaf(path: str, leaf: Any) -> Leaf:
    if type(leaf) in VALUE_TYPES:
        return Leaf(path, type(leaf).__name__)
    kind = "numpy" if isinstance(leaf, np.ndarray) else "scalar"
    return Leaf(path, kind, leaf.dtype.name, leaf.shape, itemsize=leaf.dtype.itemsize)


def check_leaf(path: str, leaf: Any) -> None:
    """Raises UnsupportedLeaf, which names the leaf and says what to do, unless it can be saved."""
    if isinstance(leaf, jax.Array):
        _check_jax(path, leaf)
    elif isinstance(leaf, np.generic) or type(leaf) in (np.ndarray, np.memmap):
        _check_dtype(path, leaf.dtype)
    elif type(leaf) not in VALUE_TYPES:
        _refuse_class(path, leaf)


def _check_jax(path: str, leaf: jax.Array) -> None:
    if isinstance(leaf, jax.core.Tracer):
        raise UnsupportedLeaf(
            f"{leaf_at(path)} is a tracer: save outside of jit and grad",
            leaf=path,
            found="tracer",
        )
    if leaf.is_deleted():
        raise UnsupportedLeaf(
            f"{leaf_at(path)} was deleted or donated: save it before that",
            leaf=path,
            found="deleted array",
        )
    refuse_partial_sums(path, leaf.sharding)
    if not is_key(leaf):
        _check_dtype(path, np.dtype(leaf.dtype))


def _refuse_class(path: str, leaf: Any) -> NoReturn:
    advice = (
        "save its arrays, or register its class: as a pytree (jax.tree_util.register_dataclass), or"
        " by register_leaf_type"
    )
    if isinstance(leaf, jax.ShapeDtypeStruct):
        advice = "it has no values: save the array that it describes"
    elif isinstance(leaf, (Json, Files)):
        advice = f"it is an item of its own: save(step, items={{{path!r}: ...}})"
    found = type_name(type(leaf))
    raise UnsupportedLeaf(
        f"{leaf_at(path)} is a {found}, which cannot be saved; {advice}", leaf=path, found=found
    )


def _signature(leaf: Any) -> tuple[type, Any, Any]:
    """Returns a type and two objects whose equality means the same plan."""
    # Those of jax arrays are often the same objects from save to save: see _same.
    if isinstance(leaf, jax.Array):
        return type(leaf), leaf.aval, leaf.sharding
    if isinstance(leaf, (np.ndarray, np.generic)):
        return type(leaf), leaf.dtype, leaf.shape
    return type(leaf), None, None


def _same_structure(one: PyTreeDef, other: PyTreeDef) -> bool:
    try:
        return bool(one == other)
    except Exception:  # of static data whose comparison fails, as that of arrays
        return False


def _same(kept: list[tuple[Any, Any, Any]], leaves: list[Any]) -> bool:
    for leaf, (cls, first, second) in zip(leaves, kept, strict=True):
        if type(leaf) is not cls:
            return False
        if hasattr(cls, "aval"):
            if leaf.sharding is not second and leaf.sharding != second:
                return False
            if leaf.aval is not first and leaf.aval != first:
                return False
        elif second is not None and (leaf.dtype != first or leaf.shape != second):
            return False
    return True


def _check_dtype(path: str, dtype: Dtype) -> None:
    if not can_store(dtype):
        raise UnsupportedLeaf(
            f"{leaf_at(path)} has dtype {dtype!s} ({dtype.str}), which cannot be saved; convert"
            " it to a little-endian number dtype",
            leaf=path,
            found=str(dtype),
        )


@functools.cache
def row_placement(count: int, rank: int) -> ShardPlacement:
    """Returns the placement of [count, ...]: a row a process, `rank` more axes. The rows are the
    host's. It is one object for all leaves.
    """
    return ShardPlacement((count, *(1,) * rank), np.arange(count)[:, None], np.full((count, 1), -1))


def placement_of(array: jax.Array, ranks: dict[int, int]) -> ShardPlacement:
    """Returns where the shards of an array lie, by arithmetic on its mesh and spec if it can."""
    slots = {shard.device: slot for slot, shard in enumerate(array.addressable_shards)}
    sharding = array.sharding
    shape = array.shape
    if isinstance(sharding, NamedSharding):
        shards_per_axis, devices = _named_shards(sharding, len(shape))
    else:
        shards_per_axis, devices = _general_shards(sharding, shape)
    flat = devices.reshape(-1).tolist()
    held = np.array([ranks.get(device.process_index, -1) for device in flat], np.int64)
    slot = np.array([slots.get(device, -1) for device in flat], np.int64)
    return ShardPlacement(shards_per_axis, held.reshape(devices.shape), slot.reshape(devices.shape))


def _named_shards(sharding: NamedSharding, rank: int) -> tuple[Shape, Any]:
    """Returns the number of shards along each axis, and the devices as [shards, replicas]."""
    mesh: Any = sharding.mesh
    names = list(mesh.axis_names)
    spec = spec_of_axes(sharding, rank)
    entries = spec + (None,) * (rank - len(spec))
    axes_used = [axes_of(entry) for entry in entries]
    order = [names.index(name) for axes in axes_used for name in axes]
    order += [axis for axis in range(len(names)) if axis not in order]
    shards_per_axis = tuple(math.prod(mesh.shape[name] for name in axes) for axes in axes_used)
    return shards_per_axis, mesh.devices.transpose(order).reshape(math.prod(shards_per_axis), -1)


def _general_shards(sharding: Sharding, shape: Shape) -> tuple[Shape, Any]:
    shard_shape = sharding.shard_shape(shape)
    shards_per_axis = tuple(
        size // along if along else 1 for size, along in zip(shape, shard_shape, strict=True)
    )
    holders: list[list[Any]] = [[] for _ in range(math.prod(shards_per_axis))]
    for device, index in sharding.devices_indices_map(shape).items():
        starts = [
            (cut.start or 0) // along if along else 0
            for cut, along in zip(index or (), shard_shape, strict=False)
        ]
        shard = int(np.ravel_multi_index(starts, shards_per_axis)) if starts else 0
        holders[shard].append(device)
    return shards_per_axis, np.array(holders, object)
