"""Brings items back, onto any topology: what is wanted, what is there, whether they fit; the reader fetches, jax gets whole batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.tree_util import PyTreeDef

from ._dtypes import dtype_named
from ._errors import HostileCheckpoint, StepNotFound, TreeMismatch
from ._planner import VALUE_TYPES
from ._reader import RECORD_NAME, ItemReader, Region, Target
from ._record import RECORD_LIMIT_BYTES, ItemRecord, LeafRecord, Record, parse_record
from ._snapshot import paused_gc
from ._storage import Storage
from ._tree import describe, flatten, rebuild
from ._writer import join

LISTED = 5  # leaves that a message names


class _Saved:
    def __repr__(self) -> str:
        return "SAVED"


SAVED: Final = _Saved()  # a `like`: the saved shardings, on this job's devices


@dataclass(frozen=True)
class Report:
    """What `verify` has found: every file was read whole and was as written."""

    path: str
    step: int
    files: int
    leaves: int
    bytes: int


@dataclass(frozen=True)
class Want:
    """One leaf that is to come back: as "numpy", "scalar", "jax" (with a sharding, or where jax puts it) or a Python "value"."""

    leaf: LeafRecord
    form: str
    dtype: np.dtype[Any] | None = None  # where it differs from the saved one
    sharding: Sharding | None = None
    value_type: type | None = None


def read_record(storage: Storage, step_dir: str) -> Record:
    """Reads `<step_dir>/checkpoint.json`; raises StepNotFound where there is none, Corrupt or HostileCheckpoint where it is damaged."""
    path = join(storage.root, step_dir, RECORD_NAME)
    try:
        data = storage.fetch(join(step_dir, RECORD_NAME), RECORD_LIMIT_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StepNotFound(f"there is no checkpoint at {join(storage.root, step_dir)}: {path} is missing", path=path) from error
    except OverflowError as error:
        raise HostileCheckpoint(f"{path}: {error}", path=path, file=path) from error
    return parse_record(data, path)


def find_item(record: Record, item: str) -> ItemRecord:
    if item not in record.items:
        message = f"{record.path}: there is no item {item!r}; it has {sorted(record.items)}"
        raise StepNotFound(message, path=record.path, step=record.step)
    return record.items[item]


def restore_item(
    storage: Storage,
    step_dir: str,
    record: Record,
    item: str = "state",
    like: Any = None,
    *,
    partial: bool | Callable[[str], bool] = False,
    cast: bool = False,
    types: Sequence[type] = (),
    read_once: bool = False,
    host_memory_bytes: int | None = None,
) -> Any:
    """Restores one tree item (a JSON item comes back as rank 0's value; see `read_json`).

    `like` is a tree of arrays, jax.ShapeDtypeStructs or values, None (numpy everywhere) or SAVED. `partial=True` ignores saved leaves that
    `like` lacks; a predicate on leaf paths says which leaves to read, and without a `like` the others come back as None, with one as they
    are in it. `cast=True` allows another dtype. Blocks; raises StepNotFound (no such item), TreeMismatch, Corrupt, HostileCheckpoint,
    StepGone.
    """
    found = find_item(record, item)
    if found.kind == "json":
        return read_json(storage, step_dir, record, item)
    return restore_tree(ItemReader(storage, step_dir, found), found, like, partial=partial, cast=cast, types=types)


class Filler(Protocol):
    """Is what a restore asks of a reader: see `ItemReader.fill`. Readers of other layouts have it too."""

    def fill(self, targets: Sequence[Target], allocate: Callable[[int], np.ndarray[Any, Any]]) -> None: ...


def restore_tree(
    reader: Filler,
    found: ItemRecord,
    like: Any = None,
    *,
    partial: bool | Callable[[str], bool] = False,
    cast: bool = False,
    types: Sequence[type] = (),
) -> Any:
    """Restores a tree item through any reader; the arguments are those of `restore_item`."""
    with paused_gc():
        if like is None or like is SAVED:
            chosen = [not callable(partial) or partial(leaf.path) for leaf in found.leaves]
            wants = [_saved_want(leaf, like is SAVED) for leaf, read in zip(found.leaves, chosen, strict=True) if read]
            values = iter(_read(reader, wants))
            return rebuild(found.tree, [next(values) if read else None for read in chosen], types)
        return _restore_like(reader, found, like, partial, cast)


def _restore_like(reader: Filler, item: ItemRecord, like: Any, partial: bool | Callable[[str], bool], cast: bool) -> Any:
    leaves, treedef = flatten(like)
    _, paths = describe(like)
    saved = {leaf.path: leaf for leaf in item.leaves}
    chosen = [not callable(partial) or partial(path) for path in paths]
    wanted = [path for path, read in zip(paths, chosen, strict=True) if read]
    _check_paths(item, wanted, saved, strict=partial is False)
    wants = [match(saved[path], leaf, cast) for path, leaf, read in zip(paths, leaves, chosen, strict=True) if read]
    values = iter(_read(reader, wants))
    return _unflatten(treedef, [next(values) if read else leaf for leaf, read in zip(leaves, chosen, strict=True)])


def _unflatten(treedef: PyTreeDef, leaves: list[Any]) -> Any:
    return jax.tree_util.tree_unflatten(treedef, leaves)


def _check_paths(item: ItemRecord, wanted: Sequence[str], saved: dict[str, LeafRecord], *, strict: bool) -> None:
    missing = [path for path in wanted if path not in saved]
    unexpected = sorted(set(saved) - set(wanted)) if strict else []
    if not missing and not unexpected:
        return
    lines = []
    if missing:
        lines.append(f"{len(missing)} leaves of `like` are not in the checkpoint: {_listed(missing)}")
    if unexpected:
        lines.append(f"{len(unexpected)} leaves of the checkpoint are not in `like`: {_listed(unexpected)} (partial=True leaves them out)")
    first = (missing or unexpected)[0]
    expected, found = ("a leaf", "none") if missing else ("none", "a leaf")
    raise TreeMismatch(f"item {item.name!r}: " + "; ".join(lines), leaf=first, expected=expected, found=found)


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(map(repr, paths[:LISTED])) + (f" and {len(paths) - LISTED} more" if len(paths) > LISTED else "")


def _saved_want(leaf: LeafRecord, as_saved: bool) -> Want:
    if leaf.grid is None:
        return Want(leaf, "value")
    if not as_saved or leaf.kind in ("numpy", "scalar"):
        return Want(leaf, "scalar" if leaf.kind == "scalar" else "numpy")
    return Want(leaf, "jax", sharding=saved_sharding(leaf))


def saved_sharding(leaf: LeafRecord) -> Sharding | None:
    """Returns a leaf's saved sharding on the devices of this job; raises TreeMismatch where they do not fit."""
    facts = leaf.sharding
    devices = {device.id: device for device in jax.devices()}
    try:
        if facts is None:
            return None
        if "device" in facts:
            return SingleDeviceSharding(devices[facts["device"]])
        chosen = np.array([devices[number] for number in facts["devices"]], object).reshape(facts["sizes"])
        return NamedSharding(Mesh(chosen, facts["axes"]), PartitionSpec(*(tuple(axes) or None for axes in facts["spec"])))
    except (KeyError, TypeError, ValueError) as error:
        message = f"the saved sharding of {leaf.path!r} ({show_sharding(facts)}) does not fit the {len(devices)} devices of this job; pass a `like`"
        raise TreeMismatch(message, leaf=leaf.path, expected=show_sharding(facts), found=f"{len(devices)} devices") from error


def show_sharding(facts: Any) -> str:
    """Returns a saved sharding for people."""
    if facts is None:
        return "local"
    if "device" in facts:
        return f"device {facts['device']}"
    if "spec" not in facts:
        return str(facts.get("other", facts))
    spec = ", ".join("+".join(axes) if axes else "-" for axes in facts["spec"]) or "replicated"
    return f"({spec}) on " + " ".join(f"{axis}={size}" for axis, size in zip(facts["axes"], facts["sizes"], strict=True))


def match(leaf: LeafRecord, like: Any, cast: bool) -> Want:
    """Returns how a saved leaf comes back as its `like`; raises TreeMismatch naming path, both shapes and both dtypes."""
    if type(like) in VALUE_TYPES:
        return _match_value(leaf, like)
    shape, dtype, found = getattr(like, "shape", None), getattr(like, "dtype", None), show_leaf(leaf)
    if shape is None or dtype is None:
        _refuse(leaf, f"a {type(like).__name__}", found)
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return _match_key(leaf, like)
    dtype = np.dtype(dtype)
    expected = f"{dtype.name}{list(shape)}"
    if leaf.grid is None:
        if tuple(shape) or not isinstance(leaf.value, (bool, int, float, complex)) or not np.can_cast(type(leaf.value), dtype, "same_kind"):
            _refuse(leaf, expected, found)
    elif leaf.kind == "key" or tuple(shape) != leaf.shape or (leaf.dtype != dtype.name and not cast):
        _refuse(leaf, expected, found)
    elif dtype_named(leaf.dtype).kind == "c" and dtype.kind != "c":  # type: ignore[union-attr]
        _refuse(leaf, expected, found)
    form = "numpy" if isinstance(like, np.ndarray) else "scalar" if isinstance(like, np.generic) else "jax"
    return Want(leaf, form, None if leaf.dtype == dtype.name else dtype, _sharding_of(like) if form == "jax" else None)


def _refuse(leaf: LeafRecord, expected: str, found: str) -> None:
    message = f"the leaf {leaf.path!r} was expected as {expected}, the checkpoint has {found}"
    raise TreeMismatch(message, leaf=leaf.path, expected=expected, found=found)


def show_leaf(leaf: LeafRecord) -> str:
    """Returns dtype and shape, or the type of a value."""
    if leaf.grid is None:
        return f"a Python {leaf.kind}"
    return f"key<{leaf.impl}>{list(leaf.shape[:-1])}" if leaf.kind == "key" else f"{leaf.dtype}{list(leaf.shape)}"


def _match_value(leaf: LeafRecord, like: Any) -> Want:
    kind = type(like)
    if leaf.grid is None:
        fits = leaf.kind == kind.__name__
    else:
        dtype = dtype_named(leaf.dtype)
        assert dtype is not None
        fits = (
            leaf.shape == ()
            and leaf.kind != "key"
            and kind in {"b": (bool,), "i": (int,), "u": (int,), "c": (complex,)}.get(dtype.kind, (float,))
        )
    if not fits:
        _refuse(leaf, f"a Python {kind.__name__}", show_leaf(leaf))
    return Want(leaf, "value", value_type=kind)


def _match_key(leaf: LeafRecord, like: Any) -> Want:
    impl = str(jax.random.key_impl(like)) if isinstance(like, jax.Array) else like.dtype._impl.name
    if leaf.kind != "key" or leaf.impl != impl or leaf.shape[:-1] != tuple(like.shape):
        _refuse(leaf, f"key<{impl}>{list(like.shape)}", show_leaf(leaf))
    return Want(leaf, "jax", sharding=_sharding_of(jax.random.key_data(like) if isinstance(like, jax.Array) else like))


def _sharding_of(like: Any) -> Sharding | None:
    """Returns where a leaf is to lie; None, where jax puts what is not committed."""
    if isinstance(like, jax.Array) and not like.committed:
        return None
    sharding = getattr(like, "sharding", None)
    return sharding if isinstance(sharding, Sharding) else None


def _read(reader: Filler, wants: Sequence[Want]) -> list[Any]:
    regions: dict[tuple[Sharding, tuple[int, ...]], dict[Any, Region]] = {}
    targets = [_targets(want, regions) for want in wants]
    reader.fill([target for found in targets for target in found.values()], allocate)
    return _assemble(wants, targets, regions)


def allocate(nbytes: int) -> np.ndarray[Any, Any]:
    """Returns 64-aligned memory: jax on CPU takes such arrays without a copy."""
    memory = np.empty(nbytes + 64, np.uint8)
    lead = -memory.ctypes.data % 64
    return memory[lead : lead + nbytes]


def _targets(want: Want, regions: dict[tuple[Sharding, tuple[int, ...]], dict[Any, Region]]) -> dict[Region, Target]:
    leaf = want.leaf
    if leaf.grid is None:
        return {}
    whole = tuple((0, size) for size in leaf.shape)
    if want.sharding is None:
        return {whole: Target(leaf, whole)}
    key = (want.sharding, leaf.shape)
    if key not in regions:
        regions[key] = _regions(want.sharding, leaf)
    return {region: Target(leaf, region) for region in regions[key].values()}


def _regions(sharding: Sharding, leaf: LeafRecord) -> dict[Any, Region]:
    """Returns the region of each of this process's devices."""
    try:
        indices = sharding.addressable_devices_indices_map(leaf.shape)
        sharding.shard_shape(leaf.shape)
    except ValueError as error:
        _refuse(leaf, f"an array that {sharding} can divide: {error}", show_leaf(leaf))
    return {device: region_of(index, leaf.shape) for device, index in indices.items()}


def region_of(index: Any, shape: Sequence[int]) -> Region:
    return tuple((piece.start or 0, size if piece.stop is None else piece.stop) for piece, size in zip(index, shape, strict=True))


def _assemble(
    wants: Sequence[Want], targets: Sequence[dict[Region, Target]], regions: dict[tuple[Sharding, tuple[int, ...]], dict[Any, Region]]
) -> list[Any]:
    values: list[Any] = [None] * len(wants)
    anywhere: dict[int, np.ndarray[Any, Any]] = {}
    for index, (want, found) in enumerate(zip(wants, targets, strict=True)):
        arrays = {region: _cast(target, want) for region, target in found.items()}
        if want.form == "jax" and want.sharding is None:
            anywhere[index] = np.asarray(want.leaf.value, want.dtype) if want.leaf.grid is None else next(iter(arrays.values()))
        elif want.form == "jax" and want.leaf.grid is not None:
            values[index] = _put(want, arrays)
        else:
            values[index] = _on_host(want, next(iter(arrays.values()), want.leaf.value))
    for index, array in zip(anywhere, jax.device_put(list(anywhere.values())), strict=True):
        values[index] = array
    for index, want in enumerate(wants):
        if want.form == "jax" and want.leaf.kind == "key":
            values[index] = jax.random.wrap_key_data(values[index], impl=want.leaf.impl)
    return values


def _cast(target: Target, want: Want) -> np.ndarray[Any, Any]:
    assert target.array is not None
    return target.array if want.dtype is None else target.array.astype(want.dtype)


def _put(want: Want, arrays: dict[Region, np.ndarray[Any, Any]]) -> jax.Array:
    shape = want.leaf.shape
    return jax.make_array_from_callback(shape, want.sharding, lambda index: arrays[region_of(index, shape)])


def _on_host(want: Want, value: Any) -> Any:
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
            if file.size > RECORD_LIMIT_BYTES:
                raise HostileCheckpoint(f"{record.path}: {file.name} is said to have {file.size} bytes", path=record.path, file=file.name)
            data = reader.read_checked(file, file.size)
            try:
                return json.loads(data)
            except (ValueError, RecursionError) as error:
                raise HostileCheckpoint(f"{record.path}: {file.name} is not JSON", path=record.path, file=file.name) from error
    raise StepNotFound(f"{record.path}: process {process} wrote nothing for the item {item!r}", path=record.path, step=record.step)


def verify_step(storage: Storage, step_dir: str, record: Record) -> Report:
    """Reads every byte of every file that the record names and checks it; raises Corrupt, HostileCheckpoint or StepGone."""
    leaves = total = 0
    for item in record.items.values():
        reader = ItemReader(storage, step_dir, item)
        if item.kind == "json":
            for file in item.files:
                reader.read_checked(file, file.size)
        else:
            leaves += len(item.leaves)
            reader.check_all()
        total += sum(file.size for file in item.files)
    return Report(join(storage.root, step_dir), record.step, len(record.file_names()), leaves, total)


__all__ = [
    "SAVED",
    "Filler",
    "Report",
    "read_json",
    "read_record",
    "restore_item",
    "restore_tree",
    "saved_sharding",
    "show_leaf",
    "show_sharding",
    "verify_step",
]
