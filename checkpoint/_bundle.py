"""Small replicated leaves of a `read_once`: each is read by one process, and all travel as bytes in one collective.

A computation for each leaf would take milliseconds to compile. Leaves are dealt to the devices of their mesh in runs, so that what a
process reads lies together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ._devices import Placement, Region
from ._match import Want, leaf_dtype
from ._plan import Ints
from ._reader import Filler, Target

BUNDLED_BYTES = 1 << 20  # leaves up to here
BUNDLE_BYTES = 256 << 20  # in one collective
ALIGN_BYTES = 64


def bundles(wants: Sequence[Want]) -> Iterator[list[int]]:
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


def read_bundle(reader: Filler, wants: Sequence[Want], allocate: Callable[[int], np.ndarray[Any, Any]]) -> list[jax.Array]:
    """Returns the arrays of wants that travel together: a collective of the processes of their mesh."""
    sharding = wants[0].sharding
    assert isinstance(sharding, NamedSharding)
    devices = list(sharding.mesh.devices.flat)
    sizes = np.array([-(-want.leaf.nbytes // ALIGN_BYTES) * ALIGN_BYTES for want in wants], np.int64)
    rows, starts, width = _deal(sizes, len(devices))
    mine = [row for row, device in enumerate(devices) if device.process_index == jax.process_index()]
    if not mine:
        return _put_all(wants, [np.zeros(0)] * len(wants))
    memory = {row: allocate(width) for row in mine}
    asked = {index: Target(wants[index].leaf, _whole(wants[index])) for index in np.flatnonzero(np.isin(rows, mine)).tolist()}
    reader.fill(list(asked.values()), allocate)
    for index, target in asked.items():
        data: Any = target.array
        memory[int(rows[index])][starts[index] : starts[index] + data.nbytes] = data.reshape(-1).view(np.uint8)
    everywhere = np.asarray(_gather(devices, width, memory).addressable_data(0))
    return _put_all(
        wants, [everywhere[row, start : start + want.leaf.nbytes] for want, row, start in zip(wants, rows, starts, strict=True)]
    )


def _deal(sizes: Ints, count: int) -> tuple[Ints, Ints, int]:
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


def _put_all(wants: Sequence[Want], data: Sequence[Any]) -> list[jax.Array]:
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


def _whole(want: Want) -> Region:
    return tuple((0, size) for size in want.leaf.shape)


__all__ = ["bundles", "read_bundle"]
