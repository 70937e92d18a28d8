"""Restores items of any `Source` onto what the caller asks for: the same promises as for our own layout, for other people's.

Every process reads only the parts that its own devices need, each once, straight into aligned buffers, in batches of bounded size.
Nothing here synchronises processes.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from ._errors import StepNotFound, TreeMismatch
from ._layouts import Index, Leaf, Part, Source, leaves_of, map_tree, whole
from ._restore import SAVED

BATCH_BYTES = 1 << 30  # host memory in flight unless the caller sets a bound
OWN_BLOCK_BYTES = 1 << 20  # an array of this size has its memory to itself, to be freed when it dies
ALIGNMENT = 64  # what jax on CPU takes without a copy
_USUAL_ITEMS = ("state", "default", "pytree")
Rename = Callable[[str], str]


@dataclass(frozen=True)
class _Target:
    """What one leaf of the result is to be: `make` makes it from the arrays of its parts."""

    leaf: Leaf
    parts: list[Index]
    make: Callable[[list[np.ndarray]], Any]


def pick_item(source: Source, item: str) -> str:
    """Returns the item that `item` means: itself, or else the one tree there is, or one of the usual names."""
    items = source.info.items
    if item in items or item != "state":
        return item
    trees = [name for name, kind in items.items() if kind == "tree"]
    for name in _USUAL_ITEMS:
        if name in trees:
            return name
    if len(trees) == 1:
        return trees[0]
    known = ", ".join(items) or "none"
    raise StepNotFound(f"{source.info.path} has no item '{item}'; it has: {known}. Name one with item=...", path=source.info.path)


def restore_source(
    source: Source,
    item: str = "state",
    like: Any = None,
    *,
    partial: bool | Callable[[str], bool] = False,
    cast: bool = False,
    rename: Rename | None = None,
    host_memory_bytes: int | None = None,
) -> Any:
    """Restores one item; the arguments mean what they mean for `CheckpointManager.restore`.

    `rename` maps the name of a stored leaf (its keys joined by ".") to the name that it has in `like`. Blocks; raises StepNotFound,
    TreeMismatch, Corrupt, HostileCheckpoint.
    """
    item = pick_item(source, item)
    if source.info.items.get(item) == "json":
        return source.json(item)
    with _no_collections():
        return _restore(source, item, like, partial, cast, rename, host_memory_bytes or BATCH_BYTES)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Keeps the garbage collector from walking tens of thousands of new small objects again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _restore(
    source: Source, item: str, like: Any, partial: bool | Callable[[str], bool], cast: bool, rename: Rename | None, budget: int
) -> Any:
    tree = source.tree(item)
    if like is None:
        return _as_stored(source, item, tree, partial if callable(partial) else None, budget, rename)
    stored = {(rename(leaf.text) if rename else leaf.text): leaf for leaf in leaves_of(tree)}
    if like is SAVED:
        like = map_tree(lambda leaf: _saved_like(leaf) if isinstance(leaf, Leaf) else leaf, tree)
    paths, treedef = jax.tree_util.tree_flatten_with_path(like)
    wanted = {".".join(_key_text(key) for key in path): value for path, value in paths}
    chosen = _match(stored, wanted, partial, source.info.path)
    targets = {name: _target(stored[name], wanted[name], cast) for name in chosen}
    made = dict(zip(targets, _read(source, item, list(targets.values()), budget), strict=True))
    return jax.tree_util.tree_unflatten(treedef, [made.get(name, wanted[name]) for name in wanted])


def _key_text(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _match(stored: Mapping[str, Leaf], wanted: Mapping[str, Any], partial: bool | Callable[[str], bool], path: str) -> list[str]:
    """Returns the names of the leaves to be read; raises TreeMismatch naming what is missing, and what is there unasked."""
    chosen = [name for name in wanted if not callable(partial) or partial(name)]
    missing = [name for name in chosen if name not in stored]
    unexpected = [] if partial else [name for name in stored if name not in wanted]
    if missing or unexpected:
        said = [f"{path} lacks {_some(missing)}"] if missing else []
        said += [f"{path} also has {_some(unexpected)}; pass partial=True to leave them out"] if unexpected else []
        raise TreeMismatch(
            "; ".join(said),
            leaf=(missing or unexpected)[0],
            expected="a leaf" if missing else "no leaf",
            found="no leaf" if missing else "a leaf",
            path=path,
        )
    return chosen


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:5])
    return f"{len(names)} leaves, {shown}, ..." if len(names) > 5 else shown


def _as_stored(source: Source, item: str, tree: Any, chosen: Callable[[str], bool] | None, budget: int, rename: Rename | None) -> Any:
    leaves = [leaf for leaf in leaves_of(tree) if chosen is None or chosen(rename(leaf.text) if rename else leaf.text)]
    made = _read(source, item, [_host_target(leaf, None, False) for leaf in leaves], budget)
    values = {id(leaf): value for leaf, value in zip(leaves, made, strict=True)}
    if rename and isinstance(tree, dict) and all(isinstance(value, Leaf) for value in tree.values()):
        return {rename(leaf.text): values[id(leaf)] for leaf in tree.values() if id(leaf) in values}
    return map_tree(lambda leaf: values.get(id(leaf)) if isinstance(leaf, Leaf) else leaf, tree)


def _target(leaf: Leaf, like: Any, cast: bool) -> _Target:
    """Says how `leaf` becomes what `like` is; raises TreeMismatch on another shape or, without `cast`, another dtype."""
    if isinstance(like, (bool, int, float, complex, str, bytes, np.ndarray, np.generic)):
        _check(leaf, like, cast)
        return _host_target(leaf, like, cast)
    if not hasattr(like, "shape") or not hasattr(like, "dtype"):
        raise TreeMismatch(f"'{leaf.text}' is asked for as {type(like).__name__}, which no stored leaf becomes", leaf=leaf.text)
    _check(leaf, like, cast)
    sharding = like.sharding if getattr(like, "committed", True) and hasattr(like, "sharding") else None
    if jax.numpy.issubdtype(like.dtype, jax.dtypes.prng_key):
        return _key_target(leaf, sharding)
    dtype = np.dtype(like.dtype)
    if sharding is None:
        return _Target(leaf, [whole(leaf).index], lambda parts: jax.numpy.asarray(parts[0], dtype))
    return _device_target(leaf, dtype, sharding)


def _check(leaf: Leaf, like: Any, cast: bool) -> None:
    if isinstance(like, (str, bytes)) or leaf.kind == "string":
        if not isinstance(like, str) or leaf.kind != "string":
            raise _mismatch(leaf, "type", type(like).__name__, leaf.kind)
        return
    shape = tuple(getattr(like, "shape", ()))
    is_key = hasattr(like, "dtype") and jax.numpy.issubdtype(like.dtype, jax.dtypes.prng_key)
    stored = leaf.shape[:-1] if is_key else leaf.shape
    if shape != stored:
        raise _mismatch(leaf, "shape", str(shape), str(stored))
    dtype = getattr(like, "dtype", None)
    if not is_key and dtype is not None and not cast and np.dtype(dtype) != leaf.dtype and leaf.kind != "scalar":
        raise _mismatch(leaf, "dtype", str(np.dtype(dtype)), f"{leaf.dtype}; pass cast=True to convert it")


def _mismatch(leaf: Leaf, what: str, expected: str, found: str) -> TreeMismatch:
    message = f"the {what} of '{leaf.text}' is not the one asked for: expected {expected}, found {found}"
    return TreeMismatch(message, leaf=leaf.text, expected=expected, found=found)


def _host_target(leaf: Leaf, like: Any, cast: bool) -> _Target:
    def make(parts: list[Any]) -> Any:
        if leaf.kind == "string":
            return leaf.value
        (array,) = parts
        if leaf.prng and like is None:
            return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=leaf.prng)
        if isinstance(like, (bool, int, float, complex)):
            return type(like)(array[()])
        if like is None:
            return array[()].item() if leaf.kind == "scalar" else array
        array = array.astype(like.dtype, copy=False)
        return array[()] if isinstance(like, np.generic) else array

    return _Target(leaf, [] if leaf.kind == "string" else [whole(leaf).index], make)


def _key_target(leaf: Leaf, sharding: Any) -> _Target:
    implementation = leaf.prng or "threefry2x32"
    if sharding is None:
        return _Target(leaf, [whole(leaf).index], lambda parts: jax.random.wrap_key_data(jax.numpy.asarray(parts[0]), impl=implementation))
    target = _device_target(leaf, leaf.dtype, sharding)  # a spec says nothing of the data's trailing axis, which is then whole
    return replace(target, make=lambda parts: jax.random.wrap_key_data(target.make(parts), impl=implementation))


def _device_target(leaf: Leaf, dtype: np.dtype[Any], sharding: Any) -> _Target:
    bounds: dict[tuple[tuple[int, int], ...], int] = {}
    for index in sharding.addressable_devices_indices_map(leaf.shape).values():
        bounds.setdefault(_bounds(index, leaf.shape), len(bounds))
    parts = [tuple(slice(*axis) for axis in bound) for bound in bounds]

    def make(arrays: list[np.ndarray]) -> Any:
        if dtype != leaf.dtype:
            arrays = [array.astype(dtype) for array in arrays]
        # The nearest public call to one batched transfer; it asks once a device, and only for this process's devices.
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: arrays[bounds[_bounds(index, leaf.shape)]], dtype=dtype)

    return _Target(leaf, parts, make)


def _bounds(index: Index | None, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((axis.start or 0, size if axis.stop is None else axis.stop) for axis, size in zip(index or (), shape, strict=False))


def _saved_like(leaf: Leaf) -> Any:
    """Returns a `like` with the sharding that was saved with a leaf."""
    if leaf.kind in ("scalar", "string"):
        return leaf.value if leaf.kind == "string" else leaf.dtype.type(0).item()
    if leaf.kind == "numpy":
        return np.empty(leaf.shape, leaf.dtype)
    shape, dtype = (leaf.shape[:-1], jax.random.key(0, impl=leaf.prng).dtype) if leaf.prng else (leaf.shape, leaf.dtype)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=_sharding_of(leaf))  # type: ignore[no-untyped-call]


def _sharding_of(leaf: Leaf) -> Any:
    """Returns the saved sharding on this job's devices; raises TreeMismatch where they do not fit."""
    about = leaf.sharding or {}
    if about.get("sharding_type") != "NamedSharding":
        return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    try:
        shape, names = tuple(about["shape"]), tuple(about["axis_names"])
        spec = [tuple(axis) if isinstance(axis, list) else axis for axis in about["partition_spec"]]
        count = int(np.prod(shape))
    except (KeyError, TypeError, ValueError):
        raise _mismatch(leaf, "saved sharding", "a mesh and a partition spec", repr(about)) from None
    if count != jax.device_count():
        raise _mismatch(leaf, "saved sharding", f"{jax.device_count()} devices, as this job has", f"a mesh of {count}")
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(shape), names)
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))  # type: ignore[no-untyped-call]


def _read(source: Source, item: str, targets: Sequence[_Target], budget: int) -> list[Any]:
    """Reads the parts of all targets in batches and makes the results."""
    made: list[Any] = []
    for batch in _batches(targets, budget):
        parts = [Part(target.leaf, index) for target in batch for index in target.parts]
        buffers = aligned_buffers(parts)
        source.read(item, parts, buffers)
        left = iter(buffers)
        made += [target.make([next(left) for _ in target.parts]) for target in batch]
    return made


def _batches(targets: Sequence[_Target], budget: int) -> Iterator[list[_Target]]:
    batch: list[_Target] = []
    size = 0
    for target in targets:
        nbytes = sum(Part(target.leaf, index).nbytes for index in target.parts)
        if batch and size + nbytes > budget:
            yield batch
            batch, size = [], 0
        batch.append(target)
        size += nbytes
    if batch:
        yield batch


def aligned_buffers(parts: Sequence[Part]) -> list[np.ndarray]:
    """Returns an empty array for each part, at a multiple of 64 bytes; small ones share one block of memory."""
    starts, total = [], 0
    for part in parts:
        starts.append(total)
        total += -(-part.nbytes // ALIGNMENT) * ALIGNMENT if part.nbytes < OWN_BLOCK_BYTES else 0
    shared = _aligned(total)
    return [
        (shared[start : start + part.nbytes] if part.nbytes < OWN_BLOCK_BYTES else _aligned(part.nbytes))
        .view(part.leaf.dtype)
        .reshape(part.shape)
        for start, part in zip(starts, parts, strict=True)
    ]


def _aligned(nbytes: int) -> np.ndarray:
    block = np.empty(nbytes + ALIGNMENT, np.uint8)
    shift = -block.ctypes.data % ALIGNMENT
    return block[shift : shift + nbytes]


__all__ = ["aligned_buffers", "pick_item", "restore_source"]
