"""Reads each byte once in the whole job and spreads it over the interconnect: the only device collectives in this room.

Small replicated leaves travel together, one collective for many of them; large ones are read as rows and spread one by one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..format.grid import Grid, Ints
from ..format.record import LeafRecord
from ..format.sharding import axes_of
from .devices import Placement, Region
from .match import LeafRequest, leaf_dtype
from .reader import ArrayReader, ReadRequest

BUNDLED_BYTES = 1 << 20  # leaves up to here

BUNDLE_BYTES = 256 << 20  # in one collective

ALIGN_BYTES = 64


def bundles(wants: Sequence[LeafRequest]) -> Iterator[list[int]]:
    """Yields the indices of wants that travel together, alike on every process: small ones, replicated over one mesh."""
    found: dict[tuple[Any, ...], list[list[int]]] = {}
    held: dict[tuple[Any, ...], int] = {}
    for index, (leaf, _, _, sharding) in enumerate(wants):
        if leaf.kind != "array" or not isinstance(sharding, NamedSharding) or not sharding.is_fully_replicated:
            continue
        if sharding.is_fully_addressable or not 0 < leaf.nbytes <= BUNDLED_BYTES:
            continue
        devices = tuple(sharding.mesh.devices.flat)
        if devices not in found or held[devices] > BUNDLE_BYTES:
            found.setdefault(devices, []).append([])
            held[devices] = 0
        found[devices][-1].append(index)
        held[devices] += leaf.nbytes
    for group in found.values():
        yield from group


def read_bundle(reader: ArrayReader, wants: Sequence[LeafRequest], allocate: Callable[[int], np.ndarray[Any, Any]]) -> list[jax.Array]:
    """Returns the arrays of wants that travel together: a collective of the processes of their mesh."""
    sharding = wants[0].sharding
    assert isinstance(sharding, NamedSharding)
    devices = list(sharding.mesh.devices.flat)
    sizes = np.array([-(-want.leaf.nbytes // ALIGN_BYTES) * ALIGN_BYTES for want in wants], np.int64)
    rows, starts, width = _deal_bundles(sizes, len(devices))
    mine = [row for row, device in enumerate(devices) if device.process_index == jax.process_index()]
    if not mine:
        return _put_all(wants, [np.zeros(0)] * len(wants))
    memory = {row: allocate(width) for row in mine}
    asked = {index: ReadRequest(wants[index].leaf, _whole(wants[index])) for index in np.flatnonzero(np.isin(rows, mine)).tolist()}
    reader.fill(list(asked.values()), allocate)
    for index, target in asked.items():
        data: Any = target.array
        memory[int(rows[index])][starts[index] : starts[index] + data.nbytes] = data.reshape(-1).view(np.uint8)
    everywhere = np.asarray(_gather(devices, width, memory).addressable_data(0))
    return _put_all(
        wants, [everywhere[row, start : start + want.leaf.nbytes] for want, row, start in zip(wants, rows, starts, strict=True)]
    )


def _deal_bundles(sizes: Ints, count: int) -> tuple[Ints, Ints, int]:
    """Returns for runs of about equal size the row of each leaf and where it starts in it, and the size of the longest row."""
    ends = np.cumsum(sizes)
    rows: Ints = np.minimum((ends - sizes // 2) * count // ends[-1], count - 1)
    firsts = np.searchsorted(rows, rows)
    starts: Ints = ends - sizes - (ends - sizes)[firsts]
    return rows, starts, int((starts + sizes).max())


def _gather(devices: list[Any], width: int, memory: dict[int, np.ndarray[Any, Any]]) -> jax.Array:
    mesh = Mesh(np.array(devices), "all")
    spread, whole = PartitionSpec("all"), PartitionSpec()  # type: ignore[no-untyped-call]

    def row_of(index: Any) -> Any:
        return memory[index[0].start or 0][None]

    array = jax.make_array_from_callback((len(devices), width), NamedSharding(mesh, spread), row_of, dtype=np.uint8)
    gathered: jax.Array = jax.jit(lambda array: array, out_shardings=NamedSharding(mesh, whole))(array)
    return gathered


def _put_all(wants: Sequence[LeafRequest], data: Sequence[Any]) -> list[jax.Array]:
    placements: dict[Any, Placement] = {}
    arrays = []
    for want, part in zip(wants, data, strict=True):
        assert want.sharding is not None
        leaf, dtype = want.leaf, want.dtype or leaf_dtype(want.leaf)
        key = want.sharding, leaf.shape, dtype
        if key not in placements:
            placements[key] = Placement(*key)
        regions = placements[key].regions  # none where the mesh has no device of this process
        value = {region: part.view(leaf_dtype(leaf)).reshape(leaf.shape).astype(dtype, copy=True) for region in regions}
        arrays.append(placements[key].put(value))
    return arrays


def _whole(want: LeafRequest) -> Region:
    return tuple((0, size) for size in want.leaf.shape)


class Route(NamedTuple):
    """How one leaf gets to where it is wanted: `read` is how it is read; `rows`, if it is [replicas, ...] then, who reads each chunk."""

    read: LeafRequest
    rows: Ints | None = None


def route(wants: Sequence[LeafRequest]) -> list[Route]:
    """Returns a route for each want, alike on every process; the work is shared evenly."""
    load: dict[tuple[Any, ...], Ints] = {}  # of the rows, on each mesh and set of axes
    return [_route(want, load) for want in wants]


def _route(want: LeafRequest, load: dict[tuple[Any, ...], Ints]) -> Route:
    leaf, sharding = want.leaf, want.sharding
    if leaf.kind != "array" or not isinstance(sharding, NamedSharding) or sharding.is_fully_addressable or 0 in leaf.shape:
        return Route(want)
    sizes = dict(zip(sharding.mesh.axis_names, sharding.mesh.devices.shape, strict=True))
    spec = [list(axes_of(entry)) for entry in sharding.spec] + [[] for _ in range(len(leaf.shape) - len(sharding.spec))]
    used = {name for axes in spec for name in axes}
    left: list[str] = []
    for name in sorted(_crossing(sharding.mesh) - used):
        place = next((axis for axis in range(len(spec)) if _divides(leaf, axis, spec[axis], name, sizes)), None)
        (left if place is None else spec[place]).append(name)
    if not left:
        return Route(want._replace(sharding=_sharding(sharding, spec)))
    count = math.prod(sizes[name] for name in left)
    stacked = replace(leaf, shape=(count, *leaf.shape), grid=Grid((count, *leaf.shape), (1, *leaf.shape), (1, *leaf.shape)))
    rows = _deal(leaf, load.setdefault((sharding.mesh, *left), np.zeros(count, np.int64)))
    return Route(LeafRequest(stacked, want.form, want.dtype, _sharding(sharding, [left, *spec])), rows)


@functools.lru_cache(maxsize=64)
def _crossing(mesh: Mesh) -> frozenset[str]:
    """Returns the axes of a mesh along which the process changes: a process reads for its own devices once anyway."""
    processes = np.vectorize(lambda device: device.process_index, otypes=[np.int64])(mesh.devices)
    return frozenset(name for axis, name in enumerate(mesh.axis_names) if np.diff(processes, axis=axis).any())


def _deal(leaf: LeafRecord, load: Ints) -> Ints:
    """Returns the row of each chunk of a leaf, from the least loaded one on, and adds them to `load`."""
    assert leaf.grid is not None
    sizes, count = leaf.grid.sizes, len(load)
    rows: Ints = (np.argmin(load) + np.arange(len(sizes)) * max(1, count // len(sizes))) % count
    load += np.bincount(rows, weights=sizes, minlength=count).astype(np.int64)
    return rows


def _divides(leaf: LeafRecord, axis: int, axes: Sequence[str], name: str, sizes: dict[str, int]) -> bool:
    """Says whether an axis of a leaf may be divided by one more mesh axis without cutting a chunk."""
    parts = math.prod(sizes[other] for other in axes) * sizes[name]
    assert leaf.grid is not None
    return leaf.shape[axis] % parts == 0 and bool(np.isin(np.arange(parts) * (leaf.shape[axis] // parts), leaf.grid.starts(axis)).all())


def _sharding(like: NamedSharding, spec: Sequence[Sequence[str]]) -> NamedSharding:
    made: Any = PartitionSpec(*(tuple(axes) or None for axes in spec))  # type: ignore[no-untyped-call]
    return NamedSharding(like.mesh, made)


class RowReader:
    """Reads leaves along their routes: see `ItemReader.fill`. Of [replicas, ...] a row has its own chunks, and zeros elsewhere."""

    def __init__(self, reader: ArrayReader, wants: Sequence[LeafRequest], routes: Sequence[Route]) -> None:
        self._reader = reader
        self._stacked = {id(way.read.leaf): (want.leaf, way.rows) for want, way in zip(wants, routes, strict=True) if way.rows is not None}

    def fill(self, targets: Sequence[ReadRequest], allocate: Callable[[int], np.ndarray[Any, Any]]) -> None:
        """Gives every target its array."""
        asked: list[ReadRequest] = []
        parts: list[tuple[ReadRequest, list[ReadRequest]]] = []
        for target in targets:
            if id(target.leaf) in self._stacked:
                leaf, rows = self._stacked[id(target.leaf)]
                parts.append((target, _own_chunks(leaf, np.flatnonzero(rows == target.region[0][0]), target.region[1:])))
                asked += parts[-1][1]
            else:
                asked.append(target)
        self._reader.fill(asked, allocate)
        for target, found in parts:
            target.array = _joined(target, found, allocate)


def _own_chunks(leaf: LeafRecord, cells: Ints, region: Region) -> list[ReadRequest]:
    """Returns targets for what some chunks of a leaf have of a region."""
    found = []
    for cell in cells.tolist():
        assert leaf.grid is not None
        bounds = zip(region, leaf.grid.region(cell), strict=True)
        part = tuple((max(ours[0], its[0]), min(ours[1], its[1])) for ours, its in bounds)
        if all(start < stop for start, stop in part):
            found.append(ReadRequest(leaf, part))
    return found


def _joined(target: ReadRequest, parts: Sequence[ReadRequest], allocate: Callable[[int], np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    if len(parts) == 1 and parts[0].shape == target.shape[1:]:
        assert parts[0].array is not None
        return parts[0].array[None]
    memory = allocate(target.nbytes)
    memory[:] = 0
    row = memory.view(leaf_dtype(target.leaf)).reshape(target.shape)
    for part in parts:
        places = zip(part.region, target.region[1:], strict=True)
        index: Any = (0, *(slice(start - first, stop - first) for (start, stop), (first, _) in places))
        row[index] = part.array
    return row


def spread(values: Sequence[Any], routes: Sequence[Route], wants: Sequence[LeafRequest]) -> list[Any]:
    """Returns the values as they were wanted; every process of the mesh calls it with the same wants."""
    result = list(values)
    groups: dict[tuple[Any, ...], list[int]] = {}  # one computation runs on one list of devices
    for index, (way, want) in enumerate(zip(routes, wants, strict=True)):
        if way.read.sharding != want.sharding:
            assert isinstance(want.sharding, NamedSharding)
            groups.setdefault(tuple(want.sharding.mesh.devices.flat), []).append(index)
    for moved in groups.values():
        stacked = [routes[index].rows is not None for index in moved]
        arrays = _move([values[index] for index in moved], stacked, [wants[index] for index in moved])
        for index, array in zip(moved, arrays, strict=True):
            result[index] = array
    return result


def _move(arrays: Sequence[jax.Array], stacked: Sequence[bool], wants: Sequence[LeafRequest]) -> Sequence[jax.Array]:
    shardings: list[Any] = [want.sharding for want in wants]
    if not any(array.addressable_shards for array in arrays):  # nothing of it is on this process
        pairs = zip(arrays, wants, shardings, strict=True)
        return [Placement(sharding, want.leaf.shape, array.dtype).put({}) for array, want, sharding in pairs]
    move = jax.jit(lambda arrays: list(map(_moved, arrays, stacked, shardings)), out_shardings=shardings)
    moved: list[jax.Array] = move(list(arrays))
    for array in moved:
        array.block_until_ready()  # collectives of meshes that share devices run one after the other
    return moved


def _moved(array: Any, stacked: bool, sharding: Any) -> Any:
    """Moves an array's bits: collectives of small floats go through larger ones, which makes other NaNs of signalling ones (seen).

    The barriers keep the compiler from seeing through the disguise.
    """
    lax: Any = jax.lax
    raw = lax.optimization_barrier(_to_bits(array))
    if stacked:
        raw = jnp.sum(raw, 0, dtype=raw.dtype)
    return _from_bits(lax.optimization_barrier(lax.with_sharding_constraint(raw, sharding)), array.dtype)


def _to_bits(array: Any) -> Any:
    """Returns an array's bits as whole numbers of at least a byte; a complex one has a last axis of 2."""
    lax: Any = jax.lax
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return jnp.stack([_to_bits(lax.real(array)), _to_bits(lax.imag(array))], -1)
    if jnp.issubdtype(array.dtype, jnp.floating):
        array = lax.bitcast_convert_type(array, f"uint{_float_bits(array.dtype)}")
    info: Any = jnp.iinfo
    if array.dtype == bool or info(array.dtype).bits < 8:
        array = array.astype(jnp.int8)
    return array


def _from_bits(array: Any, dtype: Any) -> Any:
    """Reverses `_to_bits`."""
    lax: Any = jax.lax
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = np.finfo(dtype).dtype
        return lax.complex(_from_bits(array[..., 0], part), _from_bits(array[..., 1], part))
    if jnp.issubdtype(dtype, jnp.floating):
        return lax.bitcast_convert_type(array.astype(f"uint{_float_bits(dtype)}"), dtype)
    return array.astype(dtype)


def _float_bits(dtype: Any) -> int:
    info: Any = ml_dtypes.finfo
    return int(info(dtype).bits)
