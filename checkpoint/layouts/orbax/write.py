"""Writes checkpoints in Orbax's layout: what its v0 manager and its v1 free functions both restore.

The checkpoint is made under a temporary name that no version of Orbax takes for a step, and gets
its own name when all is there. The temporary name is the writer's own, and a lock in its folder
says whether the writer lives: of two writers of one checkpoint the first that renames wins. An
object store cannot rename: there the first that makes a mark beside the checkpoint writes it.

One process writes an OCDBT database; several write plain zarr files, each the chunks that it owns,
since a database has one writer.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from holdfast.coordination import HoldfastError
from holdfast.multihost import Group, Solo

from ...agreement.exchange import ask_primary, raise_of_any
from ...arrays.jax_settings import own_settings
from ...errors import (
    Corrupt,
    SaveFailed,
    StepExists,
    UnsupportedLeaf,
    error_text,
)
from ...format.record import ItemRecord, LeafRecord
from ...format.tree import describe, flatten
from ...saving.snapshot import blamed
from ...steps.claims import CLAIM_LIMIT_BYTES, Writer, parse_writer
from ...steps.file_lock import (
    LOCK_NAME,
    FileLock,
    hold_lock_in,
    is_free,
    locks_are_local,
    read_mountinfo,
)
from ...steps.refusals import launched_writer, refuse_writers
from ...storage.local import open_to_read, sync_folder
from ...storage.path import StorePath, join
from . import metadata as orbax
from .arrays import context_of, kvstore_of
from .encode import (
    VALUE_TYPES,
    Keys,
    array_metadatas,
    array_spec,
    chunk_shape,
    custom_metadata,
    leaf_name,
    live_leaf,
    pointed,
    shardings_of,
    storable,
    walk,
)

TREE_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
ARRAY_HANDLER = "orbax.checkpoint._src.handlers.array_checkpoint_handler.ArrayCheckpointHandler"
JSON_HANDLER = "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler"
_MARK = (  # in files that only have to be there: not every store keeps empty objects
    b"written by holdfast\n"
)


class OrbaxWriter:
    """Writes one checkpoint: `add_tree` (or `add_record`) and `add_json`, `write` for each region
    that this process owns, then `finish`.

    In a group every process makes the same calls, and what one of them runs into is raised on all:
    none waits for one that has given up. `abandon` removes what was written so far. For one thread
    at a time.
    """

    def __init__(
        self,
        folder: StorePath,
        *,
        group: Group | None = None,
        timeout_s: float = 600,
        must_have_joined: bool = False,
    ) -> None:
        self._final = folder
        self._must_have_joined = must_have_joined
        self._group = group or Solo()
        self._timeout_s = timeout_s
        self._local = folder.storage.posix is not None
        self._folder = folder
        self._messages = f"orbax/{hashlib.sha256(os.fsencode(str(folder))).hexdigest()[:16]}"
        if self._local:
            token = ask_primary(
                self._group, f"{self._messages}/token", lambda: secrets.token_hex(4), timeout_s
            )
            self._folder = StorePath(folder.storage, f"{folder.name}{orbax.TEMPORARY}-{token}")
        self._has_place = False  # only the primary ever has it
        self._lock: FileLock | None = None
        self._started_ns = time.time_ns()
        # What is written is not read again.
        self._context = context_of(folder, cache_pool={"total_bytes_limit": 0})
        self._handlers: dict[str, str] = {}
        self._stores: dict[tuple[str, str], Any] = {}
        self._pending: list[tuple[str, Any]] = []
        self._ocdbt = self._group.count == 1
        self._agreements = 0
        self._failure: HoldfastError | None = None
        try:
            with self.agreed():
                self._files = ts.KvStore.open(
                    kvstore_of(self._folder), context=self._context
                ).result()
                if self._group.index == 0:
                    self._begin()
        except BaseException:
            self.abandon()
            raise

    def _begin(self) -> None:
        """Makes sure that there is nothing yet, and takes the place where the checkpoint is made.

        What writers that died have left is removed, where locks show it.
        """
        self._refuse_existing()
        if self._local:
            _remove_dead(Path(str(self._final)))
            self._has_place = True
            self._lock = hold_lock_in(Path(str(self._folder)))
            self._introduce()
            return
        self._put_mark()
        self._has_place = True
        # Between the first look and the mark another writer may have finished.
        self._refuse_existing()

    def _introduce(self) -> None:
        """Writes into the lock who holds it; a process that should have joined its job looks who
        else is here.
        """
        me = launched_writer()
        folder = Path(str(self._folder))
        (folder / LOCK_NAME).write_text(json.dumps(asdict(me)))
        if self._must_have_joined:
            final = Path(str(self._final))
            others = (made for made in _made_of(final) if made != folder)
            refuse_writers(str(final), me, _writers_of(others))

    def _refuse_existing(self) -> None:
        if self._final.names():
            raise self._taken("is there already")

    def _taken(self, why: str) -> StepExists:
        message = f"{self._final} {why}; choose another place or delete it first"
        return StepExists(message, path=str(self._final))

    @property
    def _mark(self) -> str:
        return f"{self._final.name}{orbax.TEMPORARY}"

    def _put_mark(self) -> None:
        """Puts the object that keeps other writers away. Raises StepExists where it is there."""
        values = self._final.storage.conditions
        assert values is not None
        standing, generation = values.get(self._mark)
        if standing is not None or not values.put(self._mark, _MARK, generation):
            mark = join(self._final.storage.root, self._mark)
            raise self._taken(f"is being written by another, or was by one that died ({mark})")

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Runs a block, flushes, and waits for the other processes; raises on all of them what any
        ran into.

        Blocks may stand in each other. A process that fails meets the others at the end of the
        block that they are in.
        """
        error: Exception | None = None
        try:
            yield
            self.flush()
        except Exception as found:
            error = found
        if self._failure is not None and error is self._failure:
            raise self._failure  # it is known to all
        failure = self._failure_of(error) if error is not None else None
        try:
            self._raise_of_any(failure)
        except HoldfastError as agreed:
            self._failure = agreed
            raise agreed from (error if error is not agreed else error.__cause__)

    def _failure_of(self, error: Exception) -> HoldfastError:
        self._drain()
        if isinstance(error, HoldfastError):
            return error
        process = self._group.index
        message = f"{self._final} was not saved: process {process} failed: {error_text(error)}"
        return SaveFailed(message, path=str(self._final), process=process)

    def _raise_of_any(self, own: HoldfastError | None) -> None:
        """Raises this process's failure, or the first of another; returns where there is none on
        any process.
        """
        self._agreements += 1
        raise_of_any(self._group, f"{self._messages}/{self._agreements}", own, self._timeout_s)

    def add_json(self, item: str, value: Any, *, handler: str | None = JSON_HANDLER) -> None:
        """Adds a JSON item, under the names of both versions."""
        if handler:
            self._handlers[item] = handler
        data = json.dumps(value).encode()
        for name in ("metadata", "data.json") if handler else ("metrics",):
            self._put(f"{item}/{name}", data)
        self._put(f"{item}/{orbax.COMMITTED}", _MARK)

    def add_tree(self, item: str, tree: Any) -> dict[str, Any]:
        """Adds an item and makes its arrays, still empty; returns the live arrays by their names in
        Orbax's layout.
        """
        description, paths = describe(tree)
        leaves = [
            live_leaf(path, value) for path, value in zip(paths, flatten(tree)[0], strict=True)
        ]
        names = self.add_record(
            ItemRecord(item, "tree", (), description, tuple(leaf for leaf, _ in leaves))
        )
        return {
            name: value
            for name, (leaf, value) in zip(names, leaves, strict=True)
            if leaf.grid is not None
        }

    def add_record(self, item: ItemRecord) -> list[str]:
        """Adds an item as a record describes it, its arrays still empty; returns the leaves' names
        in Orbax's layout, in their order.
        """
        self._handlers[item.name] = TREE_HANDLER
        entries = list(walk(item.tree, ()))
        if item.tree == 0:  # one array, which has no name in a tree
            self._handlers[item.name] = ARRAY_HANDLER
            entries = [((("checkpoint", False),), 0)]
        names = [leaf_name(keys) for keys, what in entries if isinstance(what, int)]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UnsupportedLeaf(
                f"two leaves are called '{twice}' in Orbax's layout; rename one of them", leaf=twice
            )
        stored = {name: storable(name, leaf) for name, leaf in zip(names, item.leaves, strict=True)}
        if self._group.index == 0:
            self._put_metadata(
                item.name,
                [
                    (keys, stored[leaf_name(keys)] if isinstance(what, int) else what)
                    for keys, what in entries
                ],
            )
        self._make(item.name, [leaf for leaf in stored.values() if leaf.kind != "str"])
        for leaf in stored.values() if self._group.index == 0 else ():
            if leaf.value is not None and leaf.kind != "str":
                self.write(item.name, leaf.path, (), np.asarray(leaf.value, leaf.dtype))
        return names

    def _put_metadata(self, item: str, entries: Sequence[tuple[Keys, LeafRecord | str]]) -> None:
        tree = {}
        for keys, leaf in entries:
            about: dict[str, Any] = {"value_type": leaf, "skip_deserialize": True}
            if isinstance(leaf, LeafRecord):
                about = {"value_type": VALUE_TYPES[leaf.kind], "skip_deserialize": False}
                if about["value_type"] == "jax.Array":
                    about["write_shape"] = chunk_shape(leaf)
            tree[repr(tuple(key for key, _ in keys))] = {
                "key_metadata": [
                    {"key": key, "key_type": 1 if index else 2} for key, index in keys
                ],
                "value_metadata": about,
            }
        metadata = {
            "tree_metadata": tree,
            "use_ocdbt": self._ocdbt,
            "use_zarr3": False,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
        self._put(f"{item}/{orbax.TREE_METADATA}", json.dumps(metadata).encode())
        leaves = [leaf for _, leaf in entries if isinstance(leaf, LeafRecord)]
        arrays = [leaf for leaf in leaves if VALUE_TYPES[leaf.kind] == "jax.Array"]
        if arrays:
            self._put(
                f"{item}/{orbax.ARRAY_METADATAS}/process_0",
                json.dumps(array_metadatas(arrays)).encode(),
            )
            self._put(f"{item}/{orbax.SHARDING}", json.dumps(shardings_of(arrays)).encode())
        strings = {leaf.path: leaf.value for leaf in leaves if leaf.kind == "str"}
        if strings:
            self._put(f"{item}/{orbax.STRINGS}", json.dumps(pointed(strings)).encode())

    def _make(self, item: str, leaves: Sequence[LeafRecord]) -> None:
        """Makes the arrays at the primary, then opens them everywhere."""
        base = kvstore_of(self._folder / item)
        if self._ocdbt:
            base = {
                "driver": "ocdbt",
                "base": base,
                "config": {"max_inline_value_bytes": 1024, "compression": {"id": "zstd"}},
            }
        if self._group.index == 0:
            self._open(item, base, leaves, create=True)
        if self._group.count > 1:
            with self.agreed():
                pass  # they are made
            if self._group.index:
                self._open(item, base, leaves, create=False)

    def _open(
        self, item: str, base: Mapping[str, Any], leaves: Sequence[LeafRecord], *, create: bool
    ) -> None:
        specs = {}
        for (
            leaf
        ) in leaves:  # each is looked at before one is made: nothing may land after a refusal
            try:
                specs[leaf.path] = ts.Spec(array_spec(base, leaf))
            except ValueError as error:
                raise UnsupportedLeaf(
                    f"Orbax's layout cannot hold '{leaf.path}', of {leaf.dtype}; save it as another"
                    f" dtype: {error}",
                    leaf=leaf.path,
                    found=leaf.dtype,
                ) from error
        first = len(self._pending)
        start = partial(ts.open, context=self._context, create=create, open=not create)
        self._start(specs, start, specs.values())
        opened = self._pending[first:]
        refusals = [future.exception() for _, future in opened]  # all have ended then
        del self._pending[first:]
        for (name, future), refused in zip(opened, refusals, strict=True):
            if refused is not None:
                raise SaveFailed(
                    f"'{name}' could not be made in {self._final}: {refused}", path=str(self._final)
                ) from refused
            self._stores[item, name] = future.result()

    def _start(
        self, names: Iterable[str], start: Callable[..., Any], values: Iterable[Any]
    ) -> None:
        """Starts what is waited for later, with a value for each name.

        No Python code runs between a start and its note, so that Ctrl-C does not come in between:
        what `abandon` does not wait for makes the folder anew.
        """
        self._pending.extend(zip(names, map(start, values), strict=True))

    def write(
        self, item: str, name: str, index: tuple[slice, ...], array: np.ndarray[Any, Any]
    ) -> None:
        """Starts writing one region of a leaf; the array must stay as it is until `flush`."""
        store = self._stores[item, name][index] if index else self._stores[item, name]
        start = partial(store.write, can_reference_source_data_indefinitely=True)
        self._start([name], start, [array])

    def flush(self) -> None:
        """Waits for what `write` has started; raises SaveFailed naming the leaf."""
        for name, future in self._pending:
            try:
                future.result()
            except (ValueError, OSError) as error:
                raise SaveFailed(
                    f"'{name}' could not be written to {self._final}: {error}",
                    path=str(self._final),
                ) from error
        self._pending = []

    def finish(self, *, metrics: Mapping[str, Any] | None = None, metadata: Any = None) -> None:
        """Waits for all writers, then makes the checkpoint appear, whole."""
        with self.agreed():
            pass  # all have written
        with self.agreed():
            if self._group.index == 0:
                self._commit(metrics, metadata)

    def _commit(self, metrics: Mapping[str, Any] | None, metadata: Any) -> None:
        for item, handler in self._handlers.items():
            if handler == TREE_HANDLER:
                self._put(f"{item}/{orbax.COMMITTED}", _MARK)
        if metrics:
            self.add_json("metrics", dict(metrics), handler=None)
        about = {
            "item_handlers": self._handlers,
            "metrics": dict(metrics or {}),
            "performance_metrics": {},
            "init_timestamp_nsecs": self._started_ns,
            "commit_timestamp_nsecs": time.time_ns(),
            "custom_metadata": custom_metadata(metadata),
        }
        self._put(orbax.CHECKPOINT_METADATA, json.dumps(about).encode())
        self._put(orbax.MARKER, _MARK)
        self._put(orbax.COMMITTED, _MARK)
        if self._local:
            self._rename()
        self._leave_place()

    def _rename(self) -> None:
        """Gives the checkpoint its name, durably. Raises StepExists where another writer did."""
        os.unlink(Path(str(self._folder), LOCK_NAME))
        try:
            os.rename(str(self._folder), str(self._final))
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise self._taken("was saved by another meanwhile") from error
            raise
        sync_folder(os.path.dirname(str(self._final)))

    def _leave_place(self) -> None:
        """Lets other writers come; a mark that cannot be deleted keeps them away."""
        self._has_place = False
        if self._lock is not None:
            self._lock.close()
        if not self._local:
            with contextlib.suppress(OSError):
                self._final.storage.delete([self._mark])

    def abandon(self) -> None:
        """Removes what an unfinished save has written, once what is on its way has arrived: it
        would come back after the deletion.
        """
        self._drain()
        self._stores = {}
        if not self._has_place:
            return
        if self._local:
            shutil.rmtree(str(self._folder), ignore_errors=True)
        else:
            with contextlib.suppress(
                ValueError, OSError
            ):  # of a store that fails; an unfinished checkpoint is none
                self._files.delete_range(ts.KvStore.KeyRange()).result()
        self._leave_place()

    def _drain(self) -> None:
        """Waits until nothing is on its way any more."""
        for _, future in self._pending:
            with contextlib.suppress(Exception):  # why the save is abandoned is known
                future.result()
        self._pending = []

    def _put(self, name: str, data: bytes) -> None:
        if self._group.index == 0:
            self._start([name], partial(self._files.write, name), [data])
            self._pending[-1][1].result()
            del self._pending[-1]


def _remove_dead(final: Path) -> None:
    """Removes what writers of one checkpoint that died have left in a POSIX folder.

    It stays where a free lock does not show that its writer is dead.
    """
    if locks_are_local(final.parent, read_mountinfo()):
        return
    for made in _made_of(final):
        with contextlib.suppress(OSError):  # it has no lock yet, or no more
            lock = FileLock(made / LOCK_NAME, create=False)
            # The lock is held until all is gone: a writer that is about to hold it begins anew.
            with contextlib.closing(lock):
                if lock.try_hold():
                    shutil.rmtree(made, ignore_errors=True)


def _made_of(final: Path) -> Iterator[Path]:
    """Returns the folders in which a checkpoint is made, or was by writers that died."""
    for made in final.parent.glob(f"{glob.escape(final.name)}{orbax.TEMPORARY}-*"):
        if not made.is_symlink():
            yield made


def _writers_of(folders: Iterable[Path]) -> Iterator[tuple[Writer, bool]]:
    """Returns who makes checkpoints in these folders, each with whether it is dead."""
    for made in folders:
        with contextlib.suppress(OSError, Corrupt):  # one that has just begun, or ended
            with os.fdopen(open_to_read(made / LOCK_NAME), "rb") as file:
                writer = parse_writer(file.read(CLAIM_LIMIT_BYTES), str(made))
            yield writer, is_free(made / LOCK_NAME)


def save_orbax(
    folder: StorePath,
    items: Mapping[str, Any],
    *,
    json_items: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    metadata: Any = None,
    group: Group | None = None,
    timeout_s: float = 600,
    must_have_joined: bool = False,
) -> None:
    """Saves live trees in Orbax's layout; each process writes the first copy of the shards that it
    holds. Blocks until all is durable.

    Raises StepExists, UnsupportedLeaf for what Orbax cannot hold (arrays of size zero, bytes,
    metadata that is no dict),
    SaveFailed; with `must_have_joined` CheckpointError as `refuse_writers`, on a file system.
    """
    metadata = custom_metadata(metadata)
    writer = OrbaxWriter(
        folder, group=group, timeout_s=timeout_s, must_have_joined=must_have_joined
    )
    try:
        with writer.agreed(), own_settings():
            for item, tree in items.items():
                arrays = writer.add_tree(item, tree)
                for name, value in arrays.items():
                    try:
                        regions = _own_regions(value, primary=group is None or group.index == 0)
                    except jax.errors.JaxRuntimeError as error:
                        raise blamed([(name, value)], error) from error
                    for index, array in regions:
                        writer.write(item, name, index, array)
            for item, value in (json_items or {}).items():
                writer.add_json(item, value)
        writer.finish(metrics=metrics, metadata=metadata)
    except BaseException:
        writer.abandon()
        raise


def _own_regions(
    value: Any, *, primary: bool
) -> list[tuple[tuple[slice, ...], np.ndarray[Any, Any]]]:
    """Returns the regions of a live array that this process writes, and their values."""
    if not isinstance(value, jax.Array) or value.is_fully_addressable:
        return [((), np.asarray(value))] if primary else []
    return [
        (shard.index, np.asarray(shard.data))
        for shard in value.addressable_shards
        if shard.replica_id == 0
    ]
