"""The arrays of one item of Orbax's, through tensorstore: any part of any leaf, many at a time.

Only the metadata files are parsed here; the arrays, in zarr v2 or v3, in an OCDBT database or in
plain files, are tensorstore's. A missing chunk is an error, never silently the fill value, unless
the checkpoint says that such chunks were left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from holdfast.coordination.names import on_the_wire

from ...arrays.dtypes import HostArray, dtype_named
from ...errors import CheckpointError, Corrupt, HostileCheckpoint
from ...format.grid import Grid, Shape
from ...format.record import ItemRecord, LeafRecord
from ...format.tree import describe, flatten
from ...restoring.reader import Allocate, ReadRequest
from ...storage.counting import CountingStorage
from ...storage.path import StorePath
from . import metadata as orbax

MAX_RANK = 32  # tensorstore's own bound
MAX_BYTES = 1 << 50  # of one leaf; what says more is no checkpoint
_CONTEXT: orbax.JsonObject = {
    "file_io_concurrency": {"limit": 32},
    "cache_pool": {"total_bytes_limit": 100_000_000},
}


class OrbaxItem:
    """One tree item: its metadata, read at once, and the arrays, opened when a region of them is
    read.
    """

    def __init__(self, name: str, folder: StorePath, context: Any, handler: str) -> None:
        self._folder = folder
        self._context = context
        self._files = folder.names()
        self._about = self._metadata()
        self._meta_name = "zarr.json" if self._about.use_zarr3 else ".zarray"
        self._base = self._find_base()
        self._stores: orbax.JsonObject = {}
        self._names: dict[str, str] = {}  # what a leaf's array is called, by the leaf's path
        self._is_single = not handler.endswith(orbax.TREE_HANDLERS) and self._about.is_single
        self.record = self._record(name)

    def _record(self, name: str) -> ItemRecord:
        folder = self._folder
        asked = self._ask_arrays()
        # tensorstore reads meanwhile
        tree, paths, order = self._tree()
        self._shardings = orbax.read_shardings(optional_json(folder, self._files, orbax.SHARDING))
        self._strings = optional_json(folder, self._files, orbax.STRINGS)
        self._prng = self._prng_implementations()
        self._arrays = self._described(asked)
        return ItemRecord(name, "tree", (), tree, self._placed(self._records(), paths, order))

    def _metadata(self) -> orbax.TreeMetadata:
        file = f"{self._folder}/{orbax.TREE_METADATA}"
        if orbax.TREE_METADATA not in self._files:
            raise Corrupt(
                f"{file} is missing: without it nobody can tell what the arrays beside it are",
                file=file,
            )
        return orbax.parse_tree_metadata(self._folder.fetch(orbax.TREE_METADATA), file)

    def _find_base(self) -> orbax.JsonObject:
        about = self._about
        base = kvstore_of(self._folder)
        ocdbt = about.use_ocdbt if about.use_ocdbt is not None else orbax.MANIFEST in self._files
        if not ocdbt:
            for leaf in about.leaves:  # names of files: they must stay inside
                if ".." in leaf.name.split("/") or "\0" in leaf.name:
                    raise HostileCheckpoint(
                        f"{self._folder}/{orbax.TREE_METADATA} names a leaf {leaf.name!r}, outside"
                        " of its folder"
                    )
            return base
        if orbax.MANIFEST not in self._files and any(_has_data(leaf) for leaf in about.leaves):
            file = f"{self._folder}/{orbax.MANIFEST}"
            raise Corrupt(
                f"{file} is missing: it leads to the data of every array of this item", file=file
            )
        return {"driver": "ocdbt", "base": base}

    def _tree(self) -> tuple[Any, list[str], list[int]]:
        """Returns the description of the tree, and its leaves' paths and numbers in flatten order.

        The numbers are those among `_records`.
        """
        numbers = itertools.count()
        values: dict[Any, Any] = {
            leaf.keys: orbax.empty_value(leaf.value_type) if leaf.empty else next(numbers)
            for leaf in self._about.leaves
        }
        tree: Any = next(iter(values.values())) if self._is_single else orbax.build_tree(values)
        if self._folder.basename == "np_random_key":
            tree = tuple(tree)
        return *describe(tree), flatten(tree)[0]

    def _records(self) -> list[LeafRecord]:
        """Returns the leaves that have a value, by their arrays' names."""
        there = [leaf for leaf in self._about.leaves if not leaf.empty]
        scalars = self._scalars([leaf.name for leaf in there if leaf.value_type == "scalar"])
        records = [self._leaf(leaf, scalars.get(leaf.name)) for leaf in there]
        if self._is_single and records and self._folder.basename == "jax_random_key":
            return [self._random_key(records[0])]
        return records

    def _leaf(self, leaf: orbax.StoredLeaf, scalar: float | None) -> LeafRecord:
        name = leaf.name
        if leaf.value_type == "string":
            return self._string(name)
        if scalar is not None:
            return LeafRecord(name, type(scalar).__name__, value=scalar)
        kind = "numpy" if leaf.value_type in ("np.ndarray", "scalar") else "array"
        return self._array(name, kind)

    def _placed(
        self, records: Sequence[LeafRecord], paths: Sequence[str], order: Sequence[int]
    ) -> tuple[LeafRecord, ...]:
        """Returns the leaves in flatten order, by the paths that they have in the tree."""
        leaves = tuple([records[number] for number in order])
        for path, leaf in zip(paths, leaves, strict=True):
            self._names[path] = leaf.path
            leaf.path = path
        return leaves

    def _random_key(self, leaf: LeafRecord) -> LeafRecord:
        folder = StorePath(self._folder.storage, f"{self._folder.name}_metadata")
        about = optional_json(folder, folder.names(), "metadata")
        if not about.get("typed"):
            return leaf
        usual = "rbg" if leaf.shape[-1:] == (4,) else "threefry2x32"
        impl = orbax.prng_name(about.get("impl") or leaf.impl or usual)
        return replace(leaf, kind="key", impl=impl)

    def _string(self, name: str) -> LeafRecord:
        value: Any = self._strings
        for key in name.split("/"):  # a name is a JSON pointer there
            value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, str):
            file = f"{self._folder}/{orbax.STRINGS}"
            raise Corrupt(
                f"{file} has no text for '{name}', which {orbax.TREE_METADATA} names",
                file=file,
                leaf=name,
            )
        return LeafRecord(name, "str", value=value)

    def _array(self, name: str, kind: str) -> LeafRecord:
        shape, dtype, grid = self._arrays[name]
        sharding = self._shardings.get(name) if kind == "array" else None
        if sharding is not None and len(sharding.get("spec", ())) > len(shape):
            # As jax takes it: P(None) of a scalar.
            sharding = sharding | {"spec": sharding["spec"][: len(shape)]}
        impl = self._prng.get(name, "")
        if impl:
            kind = "key"
        return LeafRecord(name, kind, dtype, shape, impl=impl, sharding=sharding, grid=grid)

    def _scalars(self, names: Sequence[str]) -> dict[str, bool | int | float]:
        """Reads all Python numbers at once; those that Python has no type for are left out."""
        described = [(name, self._arrays[name]) for name in names]
        arrays = [
            (name, (), np.empty((), dtype_named(about.dtype)))
            for name, about in described
            if about.shape == ()
        ]
        self._read(arrays)
        values = {name: array.item() for name, _, array in arrays}
        return {name: each for name, each in values.items() if isinstance(each, bool | int | float)}

    def _prng_implementations(self) -> dict[str, str]:
        implementations: dict[str, str] = {}
        if orbax.ARRAY_METADATAS + "/" in self._files:
            folder = self._folder / orbax.ARRAY_METADATAS
            for name in folder.names():
                data = folder.fetch(name)
                implementations |= orbax.parse_array_metadata(data, f"{folder}/{name}")
        return implementations

    def _ask_arrays(self) -> orbax.JsonObject:
        """Begins to read the zarr metadata of all arrays, side by side; returns the futures."""
        wanted = [leaf.name for leaf in self._about.leaves if _has_data(leaf)]
        if not wanted:
            return {}
        store = self._done("", ts.KvStore.open(self._base, context=self._context))
        return {
            name: store.read(f"{name}/{self._meta_name}" if name else self._meta_name)
            for name in wanted
        }

    def _described(self, asked: Mapping[str, Any]) -> dict[str, _Description]:
        """Returns how all arrays lie; blocks for what was asked."""
        found = {}
        known: dict[bytes, _Description] = {}  # most arrays of a tree are like another one
        for name, future in asked.items():
            value = self._done(name, future)
            file = f"{self._folder}/{name}/{self._meta_name}"
            if value.state != "value":
                message = (
                    f"{file} is missing: {orbax.TREE_METADATA} names the leaf '{name}', but its"
                    " array is not there"
                )
                raise Corrupt(message, file=file, leaf=name)
            data = value.value
            if data not in known:
                known[data] = _describe(orbax.parse_json(data, file), file, name)
            found[name] = known[data]
        return found

    def fill(self, reads: Sequence[ReadRequest], allocate: Allocate) -> None:
        """Gives every request its array: see ArrayReader."""
        regions = []
        for read in reads:
            read.lie_in(allocate(read.nbytes))
            if read.array is not None and read.array.size:
                index = tuple(slice(start, stop) for start, stop in read.region)
                regions.append((self._names[read.leaf.path], index, read.array))
        self._read(regions)

    def _read(self, regions: Sequence[tuple[str, tuple[slice, ...], HostArray]]) -> None:
        opening = {
            name: self._opening(name)
            for name in dict.fromkeys(name for name, _, _ in regions)
            if name not in self._stores
        }
        self._stores |= {name: self._done(name, future) for name, future in opening.items()}
        pending = []
        for name, index, array in regions:
            memory = ts.array(array, context=self._context)
            future = memory.write(
                self._stores[name][index], can_reference_source_data_indefinitely=True
            )
            pending.append((name, future, array.nbytes))
        storage = self._folder.storage
        for name, future, nbytes in pending:
            self._done(name, future)
            if isinstance(storage, CountingStorage):
                storage.on_bytes(nbytes)

    def _opening(self, name: str) -> Any:
        inside = "" if self._base["driver"] == "ocdbt" else self._base["path"]
        spec = {
            "driver": "zarr3" if self._about.use_zarr3 else "zarr",
            "kvstore": {**self._base, "path": f"{inside}{name}/" if name else inside},
            "fill_missing_data_reads": self._about.fills,
            "recheck_cached_data": False,
        }
        return ts.open(spec, context=self._context, open=True, read=True)

    def _done(self, name: str, future: Any) -> Any:
        """Returns a future's result; raises Corrupt naming the leaf ("" for all)."""
        try:
            return future.result()
        except (ValueError, OSError, NotImplementedError) as error:
            what = f"the leaf '{name}'" if name else "the arrays"
            reason = str(error).split(" [source locations=")[0]
            message = f"{what} of {self._folder} cannot be read: {reason}"
            raise Corrupt(
                message, path=str(self._folder), file=str(self._folder), leaf=name
            ) from error


def optional_json(folder: StorePath, names: Container[str], file: str) -> orbax.JsonObject:
    """Returns the JSON object in a file, if it is among a folder's names; else an empty one."""
    value = orbax.parse_json(folder.fetch(file), f"{folder}/{file}") if file in names else {}
    return value if isinstance(value, dict) else {}


def kvstore_of(folder: StorePath) -> orbax.JsonObject:
    """Returns tensorstore's JSON spec of a folder."""
    access = folder.storage.tensorstore
    path = str(folder)
    if access is None:
        raise CheckpointError(
            f"{path}: tensorstore, which reads and writes other people's arrays, does not know"
            " this store; copy it to a disk first",
            path=path,
        )
    if on_the_wire(path) != path:
        raise CheckpointError(
            f"{path!r}: tensorstore, which reads and writes other people's arrays, takes no path"
            " that is not valid UTF-8; give it another name first",
            path=path,
        )
    return access.kvstore(folder.name)


def context_of(folder: StorePath, **limits: Any) -> Any:
    """Returns a context that limits what tensorstore does at once.

    It shares the connections (and the memory) of the folder's store.
    """
    access = folder.storage.tensorstore
    parent = None if access is None else access.context
    return ts.Context(_CONTEXT | limits, parent=parent)


def _has_data(leaf: orbax.StoredLeaf) -> bool:
    return not leaf.empty and leaf.value_type != "string"


class _Description(NamedTuple):
    """A leaf's zarr metadata; leaves that have the same one share it."""

    shape: Shape
    dtype: str
    grid: Grid


def _describe(spec: Any, file: str, leaf: str) -> _Description:
    """Parses a leaf's zarr metadata (v2 or v3)."""
    try:
        shape = tuple(int(size) for size in spec["shape"])
        name = str(spec["dtype"] if "chunks" in spec else spec["data_type"])
        dtype = (
            np.dtype(name).newbyteorder("=") if name[:1] in "<>|" else ts.dtype(name).numpy_dtype
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(
            f"{file} does not describe an array: {error!r}", file=file, leaf=leaf
        ) from None
    if (
        len(shape) > MAX_RANK
        or min(shape, default=0) < 0
        or math.prod(shape) * dtype.itemsize > MAX_BYTES
    ):
        raise HostileCheckpoint(
            f"{file} describes an array of shape {shape}, which no writer makes", file=file
        )
    if dtype_named(dtype.name) is None:
        raise Corrupt(
            f"{file}: '{leaf}' is of dtype {dtype}, which jax does not have", file=file, leaf=leaf
        )
    chunk = _chunk_of(spec, shape) or shape  # an array that is not cut into equal chunks is one
    return _Description(shape, dtype.name, Grid(shape, chunk, chunk))


def _chunk_of(spec: Any, shape: Shape) -> Shape | None:
    try:
        is_v2 = "chunks" in spec
        cuts = spec["chunks"] if is_v2 else spec["chunk_grid"]["configuration"]["chunk_shape"]
        chunk = tuple(int(size) for size in cuts)
    except (KeyError, TypeError, ValueError):
        return None  # tensorstore says what is wrong when it is read
    fits = len(chunk) == len(shape) and all(
        cut > 0 and size % cut == 0 for size, cut in zip(shape, chunk, strict=True)
    )
    return chunk if fits and all(shape) else None
