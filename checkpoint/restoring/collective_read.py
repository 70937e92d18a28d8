"""Reads each byte once in the whole job and spreads it over the interconnect.

These are the only device collectives in this room.

Small replicated leaves travel in bundles: each process reads some of them into rows of bytes, and
one collective gathers the rows. Every other leaf has a route: it is read divided over more mesh
axes than it is to have, or as a stack of replicas of which each has some of the chunks and zeros
elsewhere, and a collective moves (or sums) it to its own sharding. Bundles and routes are alike on
every process.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from holdfast.multihost.group.group import clear_with_attempt

from ..arrays.jax_settings import outside_of_meshes
from ..arrays.sharding import axes_of, chosen_memory_kind, plain_sharding, spec_of_axes
from ..format.grid import Grid, Ints
from ..format.record import LeafRecord
from ..memory.pool import ALIGN_BYTES
from .devices import DevicePlacement, Region, overlap, slices_in
from .match import LeafRequest
from .ranges import converted, converted_leaf
from .reader import Allocate, ArrayReader, ReadRequest

BUNDLED_BYTES = 1 << 20  # leaves up to here
BUNDLE_BYTES = 256 << 20  # in one collective


def read_once(
    reader: ArrayReader,
    requests: Sequence[LeafRequest],
    read: Callable[[ArrayReader, Sequence[LeafRequest]], list[Any]],
    allocate: Allocate,
    before_collective: Callable[[], None],
) -> list[Any]:
    """Returns the values of the requests; every process of the job calls it alike.

    `read` is a restore without collectives. All that may fail for one process alone, above all the
    reading, comes before `before_collective`, which is called once: a process that fails in between
    would leave the others waiting in a collective.
    """
    asked = requests
    # Collectives run on meshes whose axes the compiler may divide, and go by names that are texts.
    requests = [_on_plain_mesh(request) for request in asked]
    bundles = list(_bundles(requests))
    rows = [_read_bundle(reader, bundle.of(requests), allocate) for bundle in bundles]
    bundled = {index for bundle in bundles for index in bundle.indices}
    rest = _Selected(index for index in range(len(requests)) if index not in bundled)
    routed = rest.of(requests)
    # How much the rows of each mesh and set of axes have to read: the work is shared evenly.
    load: dict[tuple[Any, ...], Ints] = {}
    routes = [_route(request, load) for request in routed]
    read_values = read(_RouteReader(reader, routed, routes), [route.request for route in routes])
    before_collective()
    values: dict[int, Any] = {}
    with outside_of_meshes():
        for bundle, bundle_rows in zip(bundles, rows, strict=True):
            values.update(bundle.numbered(_spread(bundle_rows, bundle.of(requests))))
        values.update(rest.numbered(_move_all(read_values, routes, routed)))
    pairs = zip(asked, requests, strict=True)
    return [
        values[index] if own.sharding is plain.sharding else _resharded(values[index], own.sharding)
        for index, (own, plain) in enumerate(pairs)
    ]


def _on_plain_mesh(request: LeafRequest) -> LeafRequest:
    sharding = request.sharding
    if (
        request.leaf.kind != "array"
        or not isinstance(sharding, NamedSharding)
        or sharding.is_fully_addressable
    ):
        return request
    plain = plain_sharding(sharding, len(request.leaf.shape))
    return request if plain == sharding else request._replace(sharding=plain)


def _resharded(array: jax.Array, sharding: Any) -> jax.Array:
    """Returns an array under a sharding that has the same shards on the same devices."""
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(
        array.shape, sharding, shards, dtype=array.dtype
    )


class _Selected:
    """Some of the requests, by their indices."""

    def __init__(self, indices: Iterable[int] = ()) -> None:
        self.indices = list(indices)

    def of(self, requests: Sequence[LeafRequest]) -> list[LeafRequest]:
        return [requests[index] for index in self.indices]

    def numbered(self, values: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        return zip(self.indices, values, strict=True)


def _bundles(requests: Sequence[LeafRequest]) -> Iterator[_Selected]:
    """Yields the requests that travel together: small leaves, replicated over one mesh."""
    bundles: dict[tuple[Any, ...], list[_Selected]] = {}
    held: dict[tuple[Any, ...], int] = {}
    for index, request in enumerate(requests):
        leaf = request.leaf
        sharding = request.sharding
        if leaf.kind != "array" or not isinstance(sharding, NamedSharding):
            continue
        if sharding.is_fully_addressable or not sharding.is_fully_replicated:
            continue
        if chosen_memory_kind(sharding) is not None:
            continue
        if not 0 < leaf.nbytes <= BUNDLED_BYTES:
            continue
        devices = tuple(sharding.mesh.devices.flat)
        if devices not in bundles or held[devices] > BUNDLE_BYTES:
            bundles.setdefault(devices, []).append(_Selected())
            held[devices] = 0
        bundles[devices][-1].indices.append(index)
        held[devices] += leaf.nbytes
    for of_mesh in bundles.values():
        yield from of_mesh


class _Rows(NamedTuple):
    """A bundle as rows of bytes, one for each device of its mesh.

    `memory` has the rows of this process, and is None if it has no device there. `rows` and
    `starts` say in which row each leaf lies, and where.
    """

    devices: list[Any]
    rows: Ints
    starts: Ints
    width: int
    memory: dict[int, np.ndarray[Any, Any]] | None


def _read_bundle(reader: ArrayReader, requests: Sequence[LeafRequest], allocate: Allocate) -> _Rows:
    """Reads this process's rows of a bundle."""
    sharding = requests[0].sharding
    assert isinstance(sharding, NamedSharding)
    devices = list(sharding.mesh.devices.flat)
    aligned = [-(-request.leaf.nbytes // ALIGN_BYTES) * ALIGN_BYTES for request in requests]
    rows, starts, width = _share_bytes(np.array(aligned, np.int64), len(devices))
    process = jax.process_index()
    mine = [row for row, device in enumerate(devices) if device.process_index == process]
    if not mine:
        return _Rows(devices, rows, starts, width, memory=None)
    memory = {row: allocate(width) for row in mine}
    reads = {
        index: _whole(requests[index].leaf)
        for index in np.flatnonzero(np.isin(rows, mine)).tolist()
    }
    reader.fill(list(reads.values()), allocate)
    for index, read in reads.items():
        data: Any = read.array
        dtype = requests[index].dtype
        if dtype is not None:
            # Before the collectives: what fails here fails on all processes.
            converted_leaf(read.leaf.path, data, dtype)
        start = starts[index]
        raw = data.reshape(-1).view(np.uint8)
        memory[int(rows[index])][start : start + data.nbytes] = raw
    return _Rows(devices, rows, starts, width, memory=memory)


def _whole(leaf: LeafRecord) -> ReadRequest:
    return ReadRequest(leaf, tuple((0, size) for size in leaf.shape))


def _spread(bundle: _Rows, requests: Sequence[LeafRequest]) -> list[jax.Array]:
    """Returns the arrays of one bundle: a collective of the processes of their mesh."""
    devices, rows, starts, width, memory = bundle
    if memory is None:
        return _put_all(requests, [np.zeros(0)] * len(requests))
    everywhere = np.asarray(_gather(devices, width, memory).addressable_data(0))
    data = [
        everywhere[row, start : start + request.leaf.nbytes]
        for request, row, start in zip(requests, rows, starts, strict=True)
    ]
    return _put_all(requests, data)


def _share_bytes(sizes: Ints, count: int) -> tuple[Ints, Ints, int]:
    """Shares leaves among rows of about equal size.

    Returns the row of each, where in it the leaf starts, and the longest row's size.
    """
    ends = np.cumsum(sizes)
    rows: Ints = np.minimum((ends - sizes // 2) * count // ends[-1], count - 1)
    firsts = np.searchsorted(rows, rows)
    starts: Ints = ends - sizes - (ends - sizes)[firsts]
    return rows, starts, int((starts + sizes).max())


def _gather(devices: list[Any], width: int, memory: dict[int, np.ndarray[Any, Any]]) -> jax.Array:
    mesh = Mesh(np.array(devices), "all")
    divided = NamedSharding(mesh, PartitionSpec("all"))  # type: ignore[no-untyped-call]
    whole = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]

    def row_of(index: Any) -> Any:
        return memory[index[0].start or 0][None]

    shape = (len(devices), width)
    array = jax.make_array_from_callback(shape, divided, row_of, dtype=np.uint8)
    gathered: jax.Array = jax.jit(lambda array: array, out_shardings=whole)(array)
    return gathered


def _put_all(requests: Sequence[LeafRequest], data: Sequence[Any]) -> list[jax.Array]:
    placements: dict[Any, DevicePlacement] = {}
    arrays = []
    for request, raw in zip(requests, data, strict=True):
        assert request.sharding is not None
        leaf = request.leaf
        dtype = request.dtype or leaf.numpy_dtype
        key = request.sharding, leaf.shape, dtype
        if key not in placements:
            placements[key] = DevicePlacement(*key)
        regions = placements[key].regions  # none where the mesh has no device of this process
        value = {
            region: converted(raw.view(leaf.numpy_dtype).reshape(leaf.shape), dtype)
            for region in regions
        }
        arrays.append(placements[key].put(value))
    return arrays


class _Route(NamedTuple):
    """How one leaf gets to its sharding: `request` is read first.

    Where that is a stack of replicas, `rows` says which of them has each chunk.
    """

    request: LeafRequest
    rows: Ints | None = None


def _route(request: LeafRequest, load: dict[tuple[Any, ...], Ints]) -> _Route:
    leaf = request.leaf
    sharding = request.sharding
    if (
        leaf.kind != "array"
        or not isinstance(sharding, NamedSharding)
        or sharding.is_fully_addressable
        or 0 in leaf.shape
    ):
        return _Route(request)
    sizes = dict(zip(sharding.mesh.axis_names, sharding.mesh.devices.shape, strict=True))
    spec = [list(axes_of(entry)) for entry in spec_of_axes(sharding, len(leaf.shape))]
    spec += [[] for _ in range(len(leaf.shape) - len(spec))]
    stacked_over = _divide_further(leaf, sharding.mesh, sizes, spec)
    if not stacked_over:
        return _Route(request._replace(sharding=_sharding(sharding, spec)))
    count = math.prod(sizes[name] for name in stacked_over)
    load_of_rows = load.setdefault((sharding.mesh, *stacked_over), np.zeros(count, np.int64))
    rows = _share_chunks(leaf, load_of_rows)
    spec_of_stack = _sharding(sharding, [stacked_over, *spec])
    return _Route(request._replace(leaf=_stack(leaf, count), sharding=spec_of_stack), rows)


def _divide_further(
    leaf: LeafRecord, mesh: Any, sizes: dict[str, int], spec: list[list[str]]
) -> list[str]:
    """Adds to the spec the mesh axes along which a leaf can be divided between processes.

    Returns those along which it cannot.
    """
    sharded_over = {name for axes in spec for name in axes}
    left: list[str] = []
    for name in sorted(_crossing(mesh) - sharded_over):
        dividing = [
            axes for axis, axes in enumerate(spec) if _divides(leaf, axis, axes, name, sizes)
        ]
        chosen = dividing[0] if dividing else left
        chosen.append(name)
    return left


def _stack(leaf: LeafRecord, count: int) -> LeafRecord:
    """Returns the leaf that is so many replicas of a leaf, one behind the other."""
    shape = (count, *leaf.shape)
    replica = (1, *leaf.shape)
    return replace(leaf, shape=shape, grid=Grid(shape, replica, replica))


@clear_with_attempt
@functools.lru_cache(maxsize=64)
def _crossing(mesh: Mesh) -> frozenset[str]:
    """Returns the axes of a mesh along which the process changes.

    Along the others a process reads for its own devices once anyway.
    """
    processes = np.vectorize(lambda device: device.process_index, otypes=[np.int64])(mesh.devices)
    return frozenset(
        name for axis, name in enumerate(mesh.axis_names) if np.diff(processes, axis=axis).any()
    )


def _share_chunks(leaf: LeafRecord, load: Ints) -> Ints:
    """Returns the row of each chunk, from the least loaded one on, and adds them to `load`."""
    assert leaf.grid is not None
    sizes = leaf.grid.sizes
    count = len(load)
    rows: Ints = (np.argmin(load) + np.arange(len(sizes)) * max(1, count // len(sizes))) % count
    load += np.bincount(rows, weights=sizes, minlength=count).astype(np.int64)
    return rows


def _divides(
    leaf: LeafRecord, axis: int, axes: Sequence[str], name: str, sizes: dict[str, int]
) -> bool:
    """Says whether one more mesh axis may divide an axis of a leaf, and cut no chunk."""
    count = math.prod(sizes[other] for other in axes) * sizes[name]
    assert leaf.grid is not None
    if leaf.shape[axis] % count:
        return False
    cuts = np.arange(count) * (leaf.shape[axis] // count)
    return bool(np.isin(cuts, leaf.grid.starts(axis)).all())


def _sharding(like: NamedSharding, spec: Sequence[Sequence[str]]) -> NamedSharding:
    made: Any = PartitionSpec(*(tuple(axes) or None for axes in spec))  # type: ignore[no-untyped-call]
    return NamedSharding(like.mesh, made)


class _RouteReader:
    """Reads leaves by their routes.

    Of a stack of replicas each row has its own chunks, and zeros elsewhere.
    """

    def __init__(
        self, reader: ArrayReader, requests: Sequence[LeafRequest], routes: Sequence[_Route]
    ) -> None:
        self._reader = reader
        self._stacked = {
            id(route.request.leaf): (request.leaf, route.rows)
            for request, route in zip(requests, routes, strict=True)
            if route.rows is not None
        }

    def fill(self, reads: Sequence[ReadRequest], allocate: Allocate) -> None:
        """Gives every request its array: see ArrayReader."""
        inner: list[ReadRequest] = []
        stacked: list[tuple[ReadRequest, list[ReadRequest]]] = []
        for read in reads:
            if id(read.leaf) in self._stacked:
                leaf, rows = self._stacked[id(read.leaf)]
                own = np.flatnonzero(rows == read.region[0][0])
                chunks = _chunks_within(leaf, own, read.region[1:])
                stacked.append((read, chunks))
                inner += chunks
            else:
                inner.append(read)
        self._reader.fill(inner, allocate)
        for read, chunks in stacked:
            read.take(_row_of(read, chunks, allocate))


def _chunks_within(leaf: LeafRecord, chunks: Ints, region: Region) -> list[ReadRequest]:
    """Returns requests for what some chunks of a leaf have of a region."""
    requests = []
    for index in chunks.tolist():
        assert leaf.grid is not None
        common = overlap(region, leaf.grid.region(index))
        if all(start < stop for start, stop in common):
            requests.append(ReadRequest(leaf, common))
    return requests


def _row_of(
    read: ReadRequest, chunks: Sequence[ReadRequest], allocate: Allocate
) -> np.ndarray[Any, Any]:
    if len(chunks) == 1 and chunks[0].shape == read.shape[1:]:
        assert chunks[0].array is not None
        return chunks[0].array[None]
    memory = allocate(read.nbytes)
    memory[:] = 0
    row = memory.view(read.leaf.numpy_dtype).reshape(read.shape)
    for chunk in chunks:
        row[0][slices_in(chunk.region, read.region[1:])] = chunk.array
    return row


def _move_all(
    values: Sequence[Any], routes: Sequence[_Route], requests: Sequence[LeafRequest]
) -> list[Any]:
    """Returns the values in their own shardings."""
    result = list(values)
    groups: dict[tuple[Any, ...], list[int]] = {}  # one computation runs on one list of devices
    for index, (route, request) in enumerate(zip(routes, requests, strict=True)):
        if route.request.sharding != request.sharding:
            assert isinstance(request.sharding, NamedSharding)
            groups.setdefault(tuple(request.sharding.mesh.devices.flat), []).append(index)
    for moved in groups.values():
        stacked = [routes[index].rows is not None for index in moved]
        arrays = [values[index] for index in moved]
        shifted = _move(arrays, stacked, [requests[index] for index in moved])
        for index, array in zip(moved, shifted, strict=True):
            result[index] = array
    return result


def _move(
    arrays: Sequence[jax.Array], stacked: Sequence[bool], requests: Sequence[LeafRequest]
) -> Sequence[jax.Array]:
    shardings: list[Any] = [request.sharding for request in requests]
    if not any(array.addressable_shards for array in arrays):  # nothing of it is on this process
        pairs = zip(arrays, requests, shardings, strict=True)
        return [
            DevicePlacement(sharding, request.leaf.shape, array.dtype).put({})
            for array, request, sharding in pairs
        ]
    move = jax.jit(
        lambda arrays: list(map(_moved, arrays, stacked, shardings)), out_shardings=shardings
    )
    moved: list[jax.Array] = move(list(arrays))
    for array in moved:
        # Collectives of meshes that share devices would wait for each other for ever, if two ran
        # at once: they run one after the other.
        array.block_until_ready()
    return moved


def _moved(array: Any, stacked: bool, sharding: Any) -> Any:
    """Moves an array's bits, not its numbers.

    Collectives of small floats go through larger ones, which makes other NaNs of signalling ones
    (seen). The barriers keep the compiler from seeing through the disguise.
    """
    lax: Any = jax.lax
    raw = lax.optimization_barrier(_to_bits(array))
    if stacked:
        raw = jnp.sum(raw, 0, dtype=raw.dtype)
    moved = lax.optimization_barrier(lax.with_sharding_constraint(raw, sharding))
    return _from_bits(moved, array.dtype)


def _to_bits(array: Any) -> Any:
    """Returns an array's bits as whole numbers of at least a byte.

    A complex array has a last axis of 2.
    """
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
        component = np.finfo(dtype).dtype
        real = _from_bits(array[..., 0], component)
        return lax.complex(real, _from_bits(array[..., 1], component))
    if jnp.issubdtype(dtype, jnp.floating):
        return lax.bitcast_convert_type(array.astype(f"uint{_float_bits(dtype)}"), dtype)
    return array.astype(dtype)


def _float_bits(dtype: Any) -> int:
    info: Any = ml_dtypes.finfo
    return int(info(dtype).bits)
