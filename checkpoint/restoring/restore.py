"""Brings items back, onto any topology: the reader fetches what this process's devices need, jax gets it in batches."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..errors import HostileCheckpoint, StepNotFound, TreeMismatch
from ..format.json_state import give_state, is_iterator
from ..format.record import ItemRecord, Record, find_item
from ..format.tree import describe, flatten, paused_gc, rebuild
from ..storage.base import Storage
from ..storage.path import join
from .collective_read import RowReader, bundles, read_bundle, route, spread
from .devices import Placement, Region
from .match import SAVED, LeafRequest, check_paths, leaf_dtype, match, refuse, want_as_saved
from .memory_pool import POOL
from .per_process import OwnReader, PerProcessSelection, own_leaves
from .reader import ArrayReader, ItemReader, ReadRequest

WAVE_BYTES = 2 << 30  # of host memory for bytes on their way to devices with memory of their own


@dataclass(frozen=True, kw_only=True)
class RestoreOptions:
    """What a restore is told besides what it is to be like.

    `partial=True` ignores saved leaves that `like` lacks; a predicate on leaf paths says which leaves to read, and without a `like` the
    others come back as None, with one as they are in it. `cast=True` allows another dtype. `types` are classes that may be rebuilt without
    a `like`. `read_once=True` reads replicated arrays once in the whole job and spreads them by a device collective: every process calls
    it alike. `own` says whose copies of leaves that were kept per process come back (None: those of all, along a first axis).
    """

    partial: bool | Callable[[str], bool] = False
    cast: bool = False
    types: Sequence[type] = ()
    read_once: bool = False
    own: PerProcessSelection | None = None
    host_memory_bytes: int | None = None


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` has found: every file was read whole and was as written."""

    path: str
    step: int
    files: int
    leaves: int
    bytes: int


def restore_item(
    storage: Storage,
    step_dir: str,
    record: Record,
    item: str = "state",
    like: Any = None,
    how: RestoreOptions | None = None,
) -> Any:
    """Restores one tree item (a JSON item comes back as rank 0's value; see `read_json`).

    `like` is a tree of arrays, jax.ShapeDtypeStructs or values, None (numpy everywhere) or SAVED. Blocks; raises StepNotFound (no such
    item), TreeMismatch, Corrupt, HostileCheckpoint, StepGone.
    """
    found = find_item(record, item)
    if found.kind == "json":
        return read_json(storage, step_dir, record, item)
    return restore_tree(ItemReader(storage, step_dir, found), found, like, how)


def allocate(nbytes: int) -> np.ndarray[Any, Any]:
    """Returns 64-aligned memory, which jax on CPU takes without a copy; it is used again when its arrays have died."""
    return POOL.take(nbytes)


def restore_tree(reader: ArrayReader, found: ItemRecord, like: Any = None, how: RestoreOptions | None = None) -> Any:
    """Restores a tree item through any reader; the arguments are those of `restore_item`."""
    how = how or RestoreOptions()
    partial = how.partial
    if how.own is not None and any(leaf.per_process for leaf in found.leaves):
        reader, found = OwnReader(reader, found, how.own), own_leaves(found, how.own)
    gc.collect(0)  # jax lets go of memory that dead arrays were made of when the collector runs: it is used again here
    with paused_gc():
        if like is None or like is SAVED:
            chosen = [not callable(partial) or partial(leaf.path) for leaf in found.leaves]
            wants = [want_as_saved(leaf, on_devices=like is SAVED) for leaf, read in zip(found.leaves, chosen, strict=True) if read]
            values = iter(_read_all(reader, wants, how))
            return rebuild(found.tree, [next(values) if read else None for read in chosen], how.types)
        leaves, treedef = flatten(like)
        paths = describe(like)[1]
        chosen = [not callable(partial) or partial(path) for path in paths]
        check_paths(found, [path for path, read in zip(paths, chosen, strict=True) if read], strict=partial is False)
        saved = {leaf.path: leaf for leaf in found.leaves}
        wants = [match(saved[path], leaf, how.cast) for path, leaf, read in zip(paths, leaves, chosen, strict=True) if read]
        values = iter(_read_all(reader, wants, how))
        return jax.tree_util.tree_unflatten(treedef, [next(values) if read else leaf for leaf, read in zip(leaves, chosen, strict=True)])


def _read_all(reader: ArrayReader, wants: Sequence[LeafRequest], how: RestoreOptions) -> list[Any]:
    if not how.read_once:
        return _read(reader, wants, how.host_memory_bytes)
    values: dict[int, Any] = {}
    for chosen in bundles(wants):
        values.update(zip(chosen, read_bundle(reader, [wants[index] for index in chosen], allocate), strict=True))
    rest = [index for index in range(len(wants)) if index not in values]
    others = [wants[index] for index in rest]
    routes = route(others)
    found = _read(RowReader(reader, others, routes), [way.read for way in routes], how.host_memory_bytes)
    values.update(zip(rest, spread(found, routes, others), strict=True))
    return [values[index] for index in range(len(wants))]


def _read(reader: ArrayReader, wants: Sequence[LeafRequest], host_memory_bytes: int | None) -> list[Any]:
    """Returns the values of the wants. Where devices have memory of their own it goes in waves, the next read while one is put."""
    if not _any_copies(wants):
        return _read_wave(reader, wants)
    values: list[Any] = []
    before: list[jax.Array] = []
    for wave in _waves(wants, (host_memory_bytes or WAVE_BYTES) // 2):
        now = _read_wave(reader, wave)
        for array in before:
            array.block_until_ready()
        before = [value for value in now if isinstance(value, jax.Array)]
        values += now
    return values


def _any_copies(wants: Sequence[LeafRequest]) -> bool:
    shardings = {want.sharding for want in wants if want.sharding is not None}
    devices: set[Any] = {device for sharding in shardings for device in sharding.device_set}
    return jax.default_backend() != "cpu" or any(device.platform != "cpu" for device in devices)


def _waves(wants: Sequence[LeafRequest], limit_bytes: int) -> Iterator[list[LeafRequest]]:
    wave: list[LeafRequest] = []
    held = 0
    for want in wants:
        if wave and held + want.leaf.nbytes > limit_bytes:
            yield wave
            wave, held = [], 0
        wave.append(want)
        held += want.leaf.nbytes
    yield wave


def _read_wave(reader: ArrayReader, wants: Sequence[LeafRequest]) -> list[Any]:
    placements: dict[Any, Placement] = {}
    placed = [_place(want, placements) for want in wants]
    targets = [_targets(want, placement) for want, placement in zip(wants, placed, strict=True)]
    reader.fill([target for found in targets for target in found], allocate)
    return _assemble(wants, placed, targets)


def _place(want: LeafRequest, placements: dict[Any, Placement]) -> Placement | None:
    if want.sharding is None or want.leaf.grid is None:
        return None
    leaf = want.leaf
    key = (want.sharding, leaf.shape, leaf.dtype if want.dtype is None else want.dtype)
    placement = placements.get(key)
    if placement is None:
        try:
            placement = placements[key] = Placement(want.sharding, leaf.shape, want.dtype or leaf_dtype(leaf))
        except ValueError as error:
            refuse(leaf, f"an array that {want.sharding} can divide ({error})")
    return placement


def _targets(want: LeafRequest, placement: Placement | None) -> list[ReadRequest]:
    leaf = want.leaf
    if leaf.grid is None:
        return []
    regions: list[Region] = [tuple((0, size) for size in leaf.shape)] if placement is None else placement.regions
    return [ReadRequest(leaf, region) for region in regions]


def _assemble(wants: Sequence[LeafRequest], placed: Sequence[Placement | None], targets: Sequence[list[ReadRequest]]) -> list[Any]:
    values: list[Any] = [None] * len(wants)
    anywhere: dict[int, np.ndarray[Any, Any]] = {}
    for index, (want, placement, found) in enumerate(zip(wants, placed, targets, strict=True)):
        if placement is not None:
            values[index] = placement.put({target.region: _cast(target, want) for target in found})
        elif want.form == "jax":
            anywhere[index] = _cast(found[0], want) if found else np.asarray(want.leaf.value, want.dtype)
        else:
            values[index] = _on_host(want, _cast(found[0], want) if found else want.leaf.value)
    for index, array in zip(anywhere, jax.device_put(list(anywhere.values())), strict=True):
        values[index] = array
    for index, want in enumerate(wants):
        if want.form == "jax" and want.leaf.kind == "key":
            values[index] = jax.random.wrap_key_data(values[index], impl=want.leaf.impl)
    return values


def _cast(target: ReadRequest, want: LeafRequest) -> np.ndarray[Any, Any]:
    assert target.array is not None
    return target.array if want.dtype is None else target.array.astype(want.dtype)


def _on_host(want: LeafRequest, value: Any) -> Any:
    if want.form == "value":
        return value.item() if isinstance(value, np.ndarray) else value
    value = np.asarray(value, want.dtype)
    return value[()] if want.form == "scalar" else value


def read_json(storage: Storage, step_dir: str, record: Record, item: str, process: int = 0) -> Any:
    """Returns the value that a process wrote for a JSON item; StepNotFound when that item or process has none."""
    found = find_item(record, item)
    reader = ItemReader(storage, step_dir, found)
    for file in found.files:
        if found.kind == "json" and file.name.startswith(f"{item}/{process:05d}-j-"):
            data = reader.read_whole(file)
            try:
                return json.loads(data)
            except (ValueError, RecursionError) as error:
                raise HostileCheckpoint(f"{record.path}: {file.name} is not JSON", path=record.path, file=file.name) from error
    raise StepNotFound(f"{record.path}: process {process} wrote nothing for the item {item!r}", path=record.path, step=record.step)


def verify_step(storage: Storage, step_dir: str, record: Record) -> VerifyReport:
    """Reads every byte of every file that the record names and checks it; raises Corrupt, HostileCheckpoint or StepGone."""
    leaves = total = 0
    for item in record.items.values():
        reader = ItemReader(storage, step_dir, item)
        if item.kind == "json":
            for file in item.files:
                reader.read_whole(file)
        else:
            leaves += len(item.leaves)
            reader.check_all()
        total += sum(file.size for file in item.files)
    return VerifyReport(join(storage.root, step_dir), record.step, len(record.file_names()), leaves, total)


def restore_any(storage: Storage, step_dir: str, record: Record, item: str, like: Any, options: RestoreOptions) -> Any:
    """Restores an item of any kind: a tree, a JSON value, or the state of an iterator, which `like` takes back and is returned."""
    if is_iterator(like):
        return give_state(like, read_json(storage, step_dir, record, item, _state_owner(record, item, options.own)))
    if item in record.items and record.items[item].kind == "json":
        chosen = options.own.process if options.own is not None and options.own.processes is None else 0
        return read_json(storage, step_dir, record, item, chosen)
    return restore_item(storage, step_dir, record, item, like, options)


def _state_owner(record: Record, item: str, own: PerProcessSelection | None) -> int:
    """Returns whose state an iterator takes; raises TreeMismatch on another number of processes than saved, unless one is chosen."""
    if own is None or own.processes in (None, record.processes):
        return 0 if own is None else own.process
    message = (
        f"{record.path}: the item {item!r} has a state for each of {record.processes} processes, and this job has {own.processes}; to take "
        f"that of one of them, pass process=0 to {record.processes - 1}"
    )
    raise TreeMismatch(message, leaf=item, expected=f"states of {own.processes} processes", found=f"states of {record.processes}")
