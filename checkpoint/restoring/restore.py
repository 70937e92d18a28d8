"""Restores items onto any topology.

A reader fetches what this process's devices need, and jax gets it in batches.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec, Sharding

from ..arrays.dtypes import HostArray, as_weak
from ..arrays.jax_settings import own_settings
from ..arrays.ranges import array_of, converted_leaf
from ..errors import TreeMismatch, leaf_at
from ..format.json_state import Json, is_iterator
from ..format.leaf_types import decode_leaf_types, encode_leaf_types, leaf_makers
from ..format.limits import encode_json
from ..format.own_files import Files
from ..format.record import ItemRecord, LeafRecord
from ..format.rename import Names
from ..format.tree import FlatTree, paused_gc, rebuild
from ..memory.budget import USE, WHOLE_BUDGET, MemoryBudget
from ..memory.need import MemoryNeed, find_shortage
from ..memory.pool import POOL
from .devices import DevicePlacement, Region
from .match import (
    SAVED,
    LeafRequest,
    check_leaf_types,
    check_not_only_none,
    check_paths,
    check_statics,
    listed,
    match_leaves,
    refuse,
    request_as_saved,
)
from .per_process import PerProcessSelection, leaves_of_process, read_process
from .reader import Allocate, ArrayReader, ReadRequest, foresee
from .restore_peers import RestorePeers
from .sharing import Reading
from .surgery_rules import Rules
from .waves import Placed, WaveRoom, divide_into_waves


def check_alone(need: MemoryNeed) -> None:
    """Raises NotEnoughMemory where the host has no room for what this process needs."""
    shortage = find_shortage([need])
    if shortage is not None:
        raise shortage.error


class Choice:
    """A predicate on leaf paths, which knows whether it has chosen any of those it was asked about.

    For one restore, of one item or several.
    """

    def __init__(self, predicate: Callable[[str], bool]) -> None:
        self._predicate = predicate
        self._has_chosen = False
        self._refused: list[str] = []

    def __call__(self, path: str) -> bool:
        is_chosen = bool(self._predicate(path))
        self._has_chosen |= is_chosen
        if not is_chosen:
            self._refused.append(path)
        return is_chosen

    def check(self) -> None:
        """Raises TreeMismatch where it was asked, and has chosen nothing."""
        if self._refused and not self._has_chosen:
            paths = listed(self._refused)
            raise TreeMismatch(
                f"partial= chooses no leaf, and nothing would be restored; the leaves are {paths}",
                expected="a leaf",
                found=paths,
            )


@dataclass(frozen=True, kw_only=True)
class RestoreOptions:
    """The options of a restore, besides the `like`.

    `partial=True` ignores saved leaves that `like` lacks. A predicate on leaf paths says which
    leaves to read: the others come back as None, or as they are in a `like`. `cast=True` allows
    another dtype, by value: what it cannot hold is refused, and digits may go. `types` are classes
    that may be rebuilt without a `like`; with `plain` all others become dicts and lists. `rename`
    turns the path of a stored leaf into the one that it has in `like`: a mapping, rules of
    (pattern, replacement), or a function. `rules` are rules of surgery, applied after it by
    `restore_checkpoint`. `read` is "each", "once" or "auto" (see `CheckpointManager.restore`);
    every process calls it alike. With `peers` the processes of these pass on what they read;
    without them each process reads what it needs. `memory` says what this process may take of its
    host's memory. `before_reading` is called with what a tree needs of that memory, and
    `before_giving` before iterators get their states; both may raise.
    `per_process` says whose copies of leaves that were kept per process come back (None: those of
    all, along a first axis).
    """

    partial: bool | Callable[[str], bool] = False
    cast: bool = False
    types: Sequence[type] = ()
    plain: bool = False
    rename: Names = None
    rules: Rules | None = None
    read: Reading = "auto"
    peers: RestorePeers | None = None
    per_process: PerProcessSelection | None = None
    memory: MemoryBudget = WHOLE_BUDGET
    before_reading: Callable[[MemoryNeed], None] = check_alone
    before_giving: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        if self.read not in ("each", "once", "auto"):
            raise ValueError(f'restore: read is "each", "once" or "auto", not {self.read!r}')
        partial = self.partial
        if callable(partial):
            if not isinstance(partial, Choice):
                object.__setattr__(self, "partial", Choice(partial))
        elif not isinstance(partial, bool):
            paths = [partial] if isinstance(partial, str) else partial
            raise TypeError(
                f"restore: partial={partial!r}: expected True, False, or a function that says of a"
                f" leaf's path whether it is read: partial=lambda path: path in {paths!r}"
            )
        for name in ("cast", "plain"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"restore: {name}={getattr(self, name)!r}: expected True or False")
        if isinstance(self.types, type):
            shown = self.types.__name__
            raise TypeError(f"restore: types={shown}: expected several, as in types=[{shown}]")

    def check_choice(self) -> None:
        """Raises TreeMismatch where a predicate has chosen no leaf of all items of a restore."""
        if isinstance(self.partial, Choice):
            self.partial.check()

    def check_like(self, like: Any) -> None:
        """Raises ValueError where the options do not go with the `like`, TypeError for a `like`
        that says where leaves are to lie, and not which.
        """
        if isinstance(like, Sharding | PartitionSpec | Mesh):
            raise TypeError(
                f"restore: like={type(like).__name__}(...): expected a tree of arrays or"
                " jax.ShapeDtypeStructs; for one sharding of all leaves write like=jax.tree.map("
                "lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),"
                " tree), with a `tree` of structure(...)"
            )
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


# Returns 64-aligned memory, which jax on CPU takes without a copy. It is used again when its arrays
# have died.
allocate: Allocate = POOL.take


def restore_tree(
    reader: ArrayReader, item: ItemRecord, like: Any = None, options: RestoreOptions | None = None
) -> Any:
    """Restores a tree item through any reader, under the names that the item has.

    `like` is a tree of arrays, jax.ShapeDtypeStructs or values, None (numpy everywhere) or SAVED.
    """
    options = options or RestoreOptions()
    options.check_like(like)
    if options.per_process is not None and any(leaf.per_process for leaf in item.leaves):
        reader = read_process(reader, item, options.per_process.process)
        item = leaves_of_process(item, options.per_process)
    # jax lets go of the memory of dead arrays when the collector runs: that memory is used again
    # here.
    gc.collect(0)
    with paused_gc():
        if like is None or like is SAVED:
            return _restore_as_saved(reader, item, options, on_devices=like is SAVED)
        return _restore_like(reader, item, like, options)


def _restore_as_saved(
    reader: ArrayReader, item: ItemRecord, options: RestoreOptions, *, on_devices: bool
) -> Any:
    partial = options.partial
    chosen = [not callable(partial) or partial(leaf.path) for leaf in item.leaves]
    requests = [
        request_as_saved(leaf, on_devices=on_devices)
        for leaf in itertools.compress(item.leaves, chosen)
    ]
    values = iter(_read(reader, item, requests, options))
    leaves = [next(values) if is_read else None for is_read in chosen]
    return rebuild(item.tree, leaves, options.types, plain=options.plain, makers=leaf_makers())


def _restore_like(reader: ArrayReader, item: ItemRecord, like: Any, options: RestoreOptions) -> Any:
    partial = options.partial
    flat = encode_leaf_types(FlatTree.of(like))
    if not flat.leaves:
        check_not_only_none(item, like)
    chosen = [not callable(partial) or partial(path) for path in flat.paths]
    wanted = list(itertools.compress(flat.paths, chosen))
    check_statics(item, flat.statics, wanted)
    try:
        check_paths(item, wanted, flat, strict=partial is False)
    except TreeMismatch:
        check_leaf_types(item, flat.leaves, flat.paths)
        raise
    saved = {leaf.path: leaf for leaf in item.leaves}
    requests = match_leaves(
        [saved[path] for path in wanted],
        list(itertools.compress(flat.leaves, chosen)),
        cast=options.cast,
    )
    values = iter(_read(reader, item, requests, options))
    restored = [
        next(values) if is_read else leaf for leaf, is_read in zip(flat.leaves, chosen, strict=True)
    ]
    return decode_leaf_types(flat.treedef.unflatten(restored))


@own_settings()
def _read(
    reader: ArrayReader, item: ItemRecord, requests: Sequence[LeafRequest], options: RestoreOptions
) -> list[Any]:
    """Returns the values, read in waves that fit into what the host's memory has left.

    Where devices have memory of their own, one wave is read while the wave before is put.
    """
    placements: dict[Any, DevicePlacement] = {}
    placed = [Placed.of(request, _placement_of(request, placements)) for request in requests]
    room = WaveRoom(
        item,
        options.memory,
        sum(each.wave_bytes for each in placed),
        stays=not _any_copies(requests),
        held_for_others=0 if options.peers is None else options.peers.hold_bytes,
    )
    options.before_reading(room.need_of(placed))
    foresee(reader, (read for each in placed for read in _reads_of(each)))
    values: list[Any] = []
    before: list[jax.Array] = []
    with USE.account() as held:
        for wave in divide_into_waves(placed, lambda: room.limit_bytes(held.nbytes)):
            if values:  # others may have taken what there was, or a limit was lowered
                check_alone(room.need_of(wave))
            before_bytes = held.nbytes
            held.add(sum(each.wave_bytes for each in wave))
            now = _read_wave(reader, wave)
            for array in before:
                array.block_until_ready()
            if not room.stays:
                held.drop(before_bytes)
            before = [value for value in now if isinstance(value, jax.Array)]
            values += now
    return values


def _any_copies(requests: Sequence[LeafRequest]) -> bool:
    """Says whether values go to devices that have memory of their own."""
    shardings = {request.sharding for request in requests if request.form == "jax"}
    devices: set[Any] = {each for sharding in shardings if sharding for each in sharding.device_set}
    platforms = {device.platform for device in devices}
    if None in shardings:
        platforms.add(jax.default_backend())
    return bool(platforms - {"cpu"})


def _read_wave(reader: ArrayReader, placed: Sequence[Placed]) -> list[Any]:
    reads = list(map(_reads_of, placed))
    reader.fill(list(itertools.chain.from_iterable(reads)), allocate)
    return _assemble(placed, reads)


def _placement_of(
    request: LeafRequest, placements: dict[Any, DevicePlacement]
) -> DevicePlacement | None:
    if request.sharding is None:
        return None
    leaf = request.leaf
    dtype = request.dtype or leaf.numpy_dtype
    key = (request.sharding, leaf.shape, dtype)
    if key not in placements:
        try:
            placements[key] = DevicePlacement(request.sharding, leaf.shape, dtype)
        except ValueError as error:
            refuse(leaf, f"an array that {request.sharding} can divide ({error})")
    return placements[key]


def _reads_of(placed: Placed) -> list[ReadRequest]:
    leaf = placed.request.leaf
    if leaf.grid is None:
        return []
    if placed.placement is None:
        return [ReadRequest(leaf, tuple((0, size) for size in leaf.shape))]
    return [ReadRequest(leaf, region) for region in placed.placement.regions]


def _assemble(placed: Sequence[Placed], reads: Sequence[list[ReadRequest]]) -> list[Any]:
    values = list(map(_value_of, placed, reads))
    anywhere = [
        index
        for index, each in enumerate(placed)
        if each.placement is None and each.request.form == "jax"
    ]
    # One call: each has its cost.
    arrays = jax.device_put([values[index] for index in anywhere])
    for index, array in zip(anywhere, arrays, strict=True):
        values[index] = array
    return [_finished(each.request, value) for value, each in zip(values, placed, strict=True)]


def _finished(request: LeafRequest, value: Any) -> Any:
    """Returns what an array of jax's comes back as: keys, or of a weak type."""
    if request.form == "jax" and request.leaf.kind == "key":
        return _wrap_key(request.leaf, value)
    return as_weak(value) if request.weak else value


def _value_of(placed: Placed, parts: Sequence[ReadRequest]) -> Any:
    """Returns the value of a request; what jax is to place anywhere is still the host's array."""
    request = placed.request
    if placed.placement is not None:
        return placed.placement.put(_regions(request, placed.placement, parts))
    value = _cast(parts[0], request) if parts else request.leaf.value
    if request.form == "value":
        return value.item() if isinstance(value, np.ndarray) else value
    value = array_of(value, request.dtype)
    return value[()] if request.form == "scalar" else value


def _wrap_key(leaf: LeafRecord, data: jax.Array) -> jax.Array:
    """Returns the keys of a leaf's data. Raises TreeMismatch where jax makes none of them."""
    try:
        keys: jax.Array = jax.random.wrap_key_data(data, impl=leaf.impl)
    except (TypeError, ValueError) as error:
        found = f"{leaf.dtype}{list(leaf.shape)}"
        raise TreeMismatch(
            f"{leaf_at(leaf.path)} is of keys of {leaf.impl!r}, and jax makes none of {found}:"
            f" {error}; register that implementation, or restore the data without a `like`",
            leaf=leaf.path,
            expected=leaf.impl,
            found=found,
        ) from error
    return keys


def _regions(
    request: LeafRequest, placement: DevicePlacement, parts: Sequence[ReadRequest]
) -> dict[Region, HostArray]:
    """Returns the arrays of a placement's regions: those that were read, or a Python number."""
    if request.leaf.grid is not None:
        return {read.region: _cast(read, request) for read in parts}
    return dict.fromkeys(placement.regions, array_of(request.leaf.value, request.dtype))


def _cast(read: ReadRequest, request: LeafRequest) -> HostArray:
    array = read.array
    assert array is not None
    dtype = request.dtype
    return array if dtype is None else converted_leaf(read.leaf.path, array, dtype)


def check_files_like(path: str, item: str, kind: str, like: Any) -> None:
    """Raises TreeMismatch unless an item of files meets a `like` of files, or none."""
    if kind != "files" or (like is not None and like is not SAVED and not isinstance(like, Files)):
        raise TreeMismatch(
            f"{path}: the item {item!r} is of kind {kind!r}, and its `like` is a"
            f" {type(like).__name__}; an item of files takes Files(read=...), or no `like`",
            leaf=item,
            expected=type(like).__name__,
            found=kind,
        )


def check_json_like(path: str, item: str, like: Any) -> None:
    """Raises TreeMismatch unless a JSON item meets a `like` of JSON, an iterator, or none.

    To give the class itself is a way to say so.
    """
    if like is SAVED or like is Json or isinstance(like, Json) or is_iterator(like):
        return
    try:
        encode_json(like, "the like")
    except (TypeError, ValueError, RecursionError) as error:
        raise TreeMismatch(
            f"{path}: the item {item!r} is JSON, and its `like` is not: {error}",
            leaf=item,
            expected=type(like).__name__,
            found="json",
        ) from None


def owner_of(path: str, item: str, processes: int | None, own: PerProcessSelection | None) -> int:
    """Returns whose copy comes back of an item that each of so many processes keeps for itself.

    Raises TreeMismatch on another number of processes than saved, unless one is chosen.
    """
    if own is None:
        return 0
    is_of_all = own.processes in (None, processes)
    if processes is None or (is_of_all and own.process < processes):
        return own.process
    asked = f"none for process {own.process}" if is_of_all else f"this job has {own.processes}"
    raise TreeMismatch(
        f"{path}: the item {item!r} has a state for each of {processes} processes, and {asked};"
        f" to take that of one of them, pass process=0 to {processes - 1}",
        leaf=item,
        expected=f"states of {own.processes} processes",
        found=f"states of {processes}",
    )
