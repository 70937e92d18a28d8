"""Restores items onto any topology: a reader fetches what this process's devices need, and jax gets
it in batches.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

from ..errors import HostileCheckpoint, StepNotFound, TreeMismatch
from ..format.json_state import give_state, is_iterator
from ..format.leaf_types import decode_leaf_types, encode_leaf_types, leaf_makers
from ..format.own_files import Files, give_files
from ..format.record import ItemRecord, Record, find_item
from ..format.rename import Names
from ..format.tree import FlatTree, paused_gc, rebuild
from ..storage.base import Storage
from ..storage.path import join
from .collective_read import read_once
from .devices import DevicePlacement, Region
from .match import (
    SAVED,
    LeafRequest,
    check_leaf_types,
    check_paths,
    match_leaf,
    refuse,
    request_as_saved,
)
from .memory_pool import POOL
from .per_process import PerProcessReader, PerProcessSelection, leaves_of_process
from .reader import ArrayReader, ItemReader, ReadRequest
from .renamed import RenamedReader, renamed

WAVE_BYTES = 2 << 30  # of host memory for bytes on their way to devices with memory of their own
_Placed: TypeAlias = tuple[LeafRequest, DevicePlacement | None]  # None: as one array on the host


@dataclass(frozen=True, kw_only=True)
class RestoreOptions:
    """The options of a restore, besides the `like`.

    `partial=True` ignores saved leaves that `like` lacks; a predicate on leaf paths says which
    leaves to read, and without a `like` the others come back as None, with one as they are in it.
    `cast=True` allows another dtype. `types` are classes that may be rebuilt without a `like`; with
    `plain` all others become dicts and lists. `rename` turns the path of a stored leaf into the one
    that it has in `like`: a mapping, rules of (pattern, replacement), or a function.
    `read_once=True` reads replicated arrays once in the whole job and spreads them by a device
    collective: every process calls it alike; `before_collective` is called once it has read all
    that it reads, and may raise. `per_process` says whose copies of leaves that were kept per
    process come back (None: those of all, along a first axis).
    """

    partial: bool | Callable[[str], bool] = False
    cast: bool = False
    types: Sequence[type] = ()
    plain: bool = False
    rename: Names = None
    read_once: bool = False
    per_process: PerProcessSelection | None = None
    host_memory_bytes: int | None = None
    before_collective: Callable[[], None] = lambda: None

    def check_like(self, like: Any) -> None:
        """Raises ValueError where the options do not go with the `like`."""
        if self.plain and like is not None and like is not SAVED:
            raise ValueError(
                "plain=True is for a restore without a `like` (or with SAVED): a `like` says itself"
                " of which classes its tree is"
            )


@dataclass(frozen=True)
class VerifyReport:
    """The report of a verification: every file was read whole and was as written."""

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
    options: RestoreOptions | None = None,
) -> Any:
    """Restores one tree item (a JSON item comes back as rank 0's value, one of files as
    `restore_files` has it).

    `like` is a tree of arrays, jax.ShapeDtypeStructs or values, None (numpy everywhere) or SAVED.
    Blocks; raises StepNotFound (no such item), TreeMismatch, Corrupt, HostileCheckpoint, StepGone.
    """
    found = find_item(record, item)
    if found.kind == "json":
        return read_json(storage, step_dir, record, item)
    if found.kind == "files":
        return restore_files(
            storage, step_dir, record, item, like, None if options is None else options.per_process
        )
    return restore_tree(ItemReader(storage, step_dir, found), found, like, options)


def allocate(nbytes: int) -> np.ndarray[Any, Any]:
    """Returns 64-aligned memory, which jax on CPU takes without a copy; it is used again when its
    arrays have died.
    """
    return POOL.take(nbytes)


def restore_tree(
    reader: ArrayReader, found: ItemRecord, like: Any = None, options: RestoreOptions | None = None
) -> Any:
    """Restores a tree item through any reader; the arguments are those of `restore_item`."""
    options = options or RestoreOptions()
    options.check_like(like)
    partial = options.partial
    if options.rename is not None:
        original, found = found, renamed(found, options.rename)
        reader = RenamedReader(reader, found, original)
    if options.per_process is not None and any(leaf.per_process for leaf in found.leaves):
        reader, found = (
            PerProcessReader(reader, found, options.per_process),
            leaves_of_process(found, options.per_process),
        )
    gc.collect(
        0
        # jax lets go of memory that dead arrays were made of when the collector runs: it is used
        # again here
    )
    with paused_gc():
        if like is None or like is SAVED:
            chosen = [not callable(partial) or partial(leaf.path) for leaf in found.leaves]
            requests = [
                request_as_saved(leaf, on_devices=like is SAVED)
                for leaf, read in zip(found.leaves, chosen, strict=True)
                if read
            ]
            values = iter(_read_all(reader, requests, options))
            leaves = [next(values) if read else None for read in chosen]
            return rebuild(
                found.tree, leaves, options.types, plain=options.plain, makers=leaf_makers()
            )
        like = encode_leaf_types(FlatTree.of(like))
        leaves = like.leaves
        paths = like.paths
        chosen = [not callable(partial) or partial(path) for path in paths]
        try:
            check_paths(
                found,
                [path for path, read in zip(paths, chosen, strict=True) if read],
                strict=partial is False,
            )
        except TreeMismatch:
            check_leaf_types(found, leaves, paths)
            raise
        saved = {leaf.path: leaf for leaf in found.leaves}
        requests = [
            match_leaf(saved[path], leaf, options.cast)
            for path, leaf, read in zip(paths, leaves, chosen, strict=True)
            if read
        ]
        values = iter(_read_all(reader, requests, options))
        restored = [
            next(values) if read else leaf for leaf, read in zip(leaves, chosen, strict=True)
        ]
        return decode_leaf_types(like.treedef.unflatten(restored))


def _read_all(
    reader: ArrayReader, requests: Sequence[LeafRequest], options: RestoreOptions
) -> list[Any]:
    def read(reader: ArrayReader, requests: Sequence[LeafRequest]) -> list[Any]:
        return _read(reader, requests, options.host_memory_bytes)

    return (
        read_once(reader, requests, read, allocate, options.before_collective)
        if options.read_once
        else read(reader, requests)
    )


def _read(
    reader: ArrayReader, requests: Sequence[LeafRequest], host_memory_bytes: int | None
) -> list[Any]:
    """Returns the values. Where devices have memory of their own they are read in waves, the next
    one while one is put.
    """
    placements: dict[Any, DevicePlacement] = {}
    placed = [(request, _placement_of(request, placements)) for request in requests]
    if not _any_copies(requests):
        return _read_wave(reader, placed)
    values: list[Any] = []
    before: list[jax.Array] = []
    for wave in _waves(placed, (host_memory_bytes or WAVE_BYTES) // 2):
        now = _read_wave(reader, wave)
        for array in before:
            array.block_until_ready()
        before = [value for value in now if isinstance(value, jax.Array)]
        values += now
    return values


def _any_copies(requests: Sequence[LeafRequest]) -> bool:
    shardings = {request.sharding for request in requests if request.sharding is not None}
    devices: set[Any] = {device for sharding in shardings for device in sharding.device_set}
    return jax.default_backend() != "cpu" or any(device.platform != "cpu" for device in devices)


def _waves(placed: Sequence[_Placed], limit_bytes: int) -> Iterator[list[_Placed]]:
    """Yields the requests in turns of at most so many bytes that this process reads (one that has
    more comes alone).
    """
    wave: list[_Placed] = []
    held = 0
    for request, placement in placed:
        nbytes = sum(read.nbytes for read in _reads_of(request, placement))
        if wave and held + nbytes > limit_bytes:
            yield wave
            wave = []
            held = 0
        wave.append((request, placement))
        held += nbytes
    yield wave


def _read_wave(reader: ArrayReader, placed: Sequence[_Placed]) -> list[Any]:
    reads = [_reads_of(request, placement) for request, placement in placed]
    reader.fill([read for found in reads for read in found], allocate)
    return _assemble(placed, reads)


def _placement_of(
    request: LeafRequest, placements: dict[Any, DevicePlacement]
) -> DevicePlacement | None:
    if request.sharding is None or request.leaf.grid is None:
        return None
    leaf = request.leaf
    key = (request.sharding, leaf.shape, leaf.dtype if request.dtype is None else request.dtype)
    placement = placements.get(key)
    if placement is None:
        try:
            placement = placements[key] = DevicePlacement(
                request.sharding, leaf.shape, request.dtype or leaf.numpy_dtype
            )
        except ValueError as error:
            refuse(leaf, f"an array that {request.sharding} can divide ({error})")
    return placement


def _reads_of(request: LeafRequest, placement: DevicePlacement | None) -> list[ReadRequest]:
    leaf = request.leaf
    if leaf.grid is None:
        return []
    regions: list[Region] = (
        [tuple((0, size) for size in leaf.shape)] if placement is None else placement.regions
    )
    return [ReadRequest(leaf, region) for region in regions]


def _assemble(placed: Sequence[_Placed], reads: Sequence[list[ReadRequest]]) -> list[Any]:
    values: list[Any] = [None] * len(placed)
    anywhere: dict[int, np.ndarray[Any, Any]] = {}
    for index, ((request, placement), found) in enumerate(zip(placed, reads, strict=True)):
        if placement is not None:
            values[index] = placement.put({read.region: _cast(read, request) for read in found})
        elif request.form == "jax":
            anywhere[index] = (
                _cast(found[0], request) if found else np.asarray(request.leaf.value, request.dtype)
            )
        else:
            values[index] = _on_host(
                request, _cast(found[0], request) if found else request.leaf.value
            )
    for index, array in zip(anywhere, jax.device_put(list(anywhere.values())), strict=True):
        values[index] = array
    for index, (request, _) in enumerate(placed):
        if request.form == "jax" and request.leaf.kind == "key":
            values[index] = jax.random.wrap_key_data(values[index], impl=request.leaf.impl)
    return values


def _cast(read: ReadRequest, request: LeafRequest) -> np.ndarray[Any, Any]:
    assert read.array is not None
    return read.array if request.dtype is None else read.array.astype(request.dtype)


def _on_host(request: LeafRequest, value: Any) -> Any:
    if request.form == "value":
        return value.item() if isinstance(value, np.ndarray) else value
    value = np.asarray(value, request.dtype)
    return value[()] if request.form == "scalar" else value


def read_json(storage: Storage, step_dir: str, record: Record, item: str, process: int = 0) -> Any:
    """Returns the value that a process wrote for a JSON item, or the one that is all processes';
    StepNotFound where there is none.
    """
    found = find_item(record, item)
    reader = ItemReader(storage, step_dir, found)
    is_shared = len(found.files) == 1 < record.processes
    for file in found.files:
        if found.kind == "json" and (is_shared or file.name.startswith(f"{item}/{process:05d}-j-")):
            data = reader.read_whole(file)
            try:
                return json.loads(data)
            except (ValueError, RecursionError) as error:
                raise HostileCheckpoint(
                    f"{record.path}: {file.name} is not JSON", path=record.path, file=file.name
                ) from error
    raise StepNotFound(
        f"{record.path}: process {process} wrote nothing for the item {item!r}",
        path=record.path,
        step=record.step,
    )


def restore_files(
    storage: Storage,
    step_dir: str,
    record: Record,
    item: str,
    like: Any = None,
    selection: PerProcessSelection | None = None,
) -> Any:
    """Restores an item of files: by the `read` of a `like` that is Files, else as a dict of the
    files by their own names; each is checked.

    Of files that each process has kept for itself those of `selection` come back. Raises
    TreeMismatch where it is of another kind, or of another number of processes.
    """
    check_files_like(record.path, item, find_item(record, item).kind, like)
    return give_files(like, open_files(storage, step_dir, record, item, selection), record.path)


def check_files_like(path: str, item: str, kind: str, like: Any) -> None:
    """Raises TreeMismatch unless an item of files meets a `like` of files, or none."""
    if kind != "files" or (like is not None and like is not SAVED and not isinstance(like, Files)):
        found = (
            f"{path}: the item {item!r} is of kind {kind!r}, and its `like` is a"
            f" {type(like).__name__}"
        )
        message = f"{found}; an item of files takes Files(read=...), or no `like`"
        raise TreeMismatch(message, leaf=item, expected=type(like).__name__, found=kind)


def open_files(
    storage: Storage,
    step_dir: str,
    record: Record,
    item: str,
    selection: PerProcessSelection | None,
) -> Iterator[tuple[str, Iterator[memoryview]]]:
    """Yields the files of an item of files: each one's own name, and its bytes in pieces, which are
    checked after the last.
    """
    found = find_item(record, item)
    reader, owner = ItemReader(storage, step_dir, found), ""
    if found.per_process:
        owner = f"{_state_owner(record, item, selection):05d}/"
    for name, file in zip(found.names, found.files, strict=True):
        if name.startswith(owner):
            yield name.removeprefix(owner), reader.pieces(file)


def verify_step(storage: Storage, step_dir: str, record: Record) -> VerifyReport:
    """Reads every byte of every file that the record names and checks it; raises Corrupt,
    HostileCheckpoint or StepGone.
    """
    leaves = total = 0
    for item in record.items.values():
        reader = ItemReader(storage, step_dir, item)
        if item.kind != "tree":
            for file in item.files:
                reader.read_whole(file) if item.kind == "json" else reader.check_file(file)
        else:
            leaves += len(item.leaves)
            reader.check_all()
        total += sum(file.size for file in item.files)
    return VerifyReport(
        join(storage.root, step_dir), record.step, len(record.file_names()), leaves, total
    )


def restore_any(
    storage: Storage, step_dir: str, record: Record, item: str, like: Any, options: RestoreOptions
) -> Any:
    """Restores an item of any kind: a tree, a JSON value, or the state of an iterator, which `like`
    takes back and is returned.
    """
    if isinstance(like, Files):
        return restore_files(storage, step_dir, record, item, like, options.per_process)
    if is_iterator(like):
        return give_state(
            like,
            read_json(
                storage, step_dir, record, item, _state_owner(record, item, options.per_process)
            ),
        )
    if item in record.items and record.items[item].kind == "json":
        chosen = (
            options.per_process.process
            if options.per_process is not None and options.per_process.processes is None
            else 0
        )
        return read_json(storage, step_dir, record, item, chosen)
    return restore_item(storage, step_dir, record, item, like, options)


def _state_owner(record: Record, item: str, own: PerProcessSelection | None) -> int:
    """Returns whose state an iterator takes; raises TreeMismatch on another number of processes
    than saved, unless one is chosen.
    """
    if own is None or own.processes in (None, record.processes):
        return 0 if own is None else own.process
    message = (
        f"{record.path}: the item {item!r} has a state for each of {record.processes} processes,"
        f" and this job has {own.processes}; to take that of one of them, pass process=0 to"
        f" {record.processes - 1}"
    )
    raise TreeMismatch(
        message,
        leaf=item,
        expected=f"states of {own.processes} processes",
        found=f"states of {record.processes}",
    )
