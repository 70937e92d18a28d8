"""Writes checkpoints in Orbax's layout: what its v0 manager and its v1 free functions both restore.

The checkpoint is made under a temporary name that no version of Orbax takes for a step, and gets
its own name when all is there. The temporary name is the writer's own, and a lock in its folder
says whether the writer lives: of two writers of one checkpoint the first that renames wins. An
object store cannot rename: there the first that makes a mark beside the checkpoint writes it.

One process writes, since an OCDBT database has one writer. What several save lies `aside` first, in
holdfast's own layout, and is converted (see `single_save`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from holdfast.coordination import HoldfastError

from ...arrays.dtypes import HostArray
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
from ...steps.claims import CLAIM_LIMIT_BYTES, Writer, launched_writer, parse_writer
from ...steps.file_lock import (
    LOCK_NAME,
    FileLock,
    hold_lock_in,
    is_free,
    locks_are_local,
)
from ...steps.refusals import refuse_writers
from ...storage.local import open_to_read, scan_folder, sync_folder
from ...storage.path import StorePath, join
from . import metadata as orbax
from .arrays import context_of, kvstore_of
from .encode import (
    Entry,
    array_spec,
    custom_metadata,
    item_files,
    live_leaf,
    storable,
    walk,
)
from .metadata import leaf_name

TREE_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
ARRAY_HANDLER = "orbax.checkpoint._src.handlers.array_checkpoint_handler.ArrayCheckpointHandler"
JSON_HANDLER = "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler"
ASIDE = ".saved"  # no name of an item
_MARK = (  # in files that only have to be there: not every store keeps empty objects
    b"written by holdfast\n"
)


class OrbaxWriter:
    """Writes one checkpoint: `add_record` and `add_json`, `write` for each array, then `finish`.
    `abandon` removes what was written so far, also `aside`. For one thread at a time.
    """

    def __init__(self, folder: StorePath, *, must_have_joined: bool = False) -> None:
        self._final = folder
        self._path = str(folder)
        self._must_have_joined = must_have_joined
        self._local = folder.storage.posix is not None
        self._folder = folder
        if self._local:
            made = f"{folder.name}{orbax.TEMPORARY}-{secrets.token_hex(4)}"
            self._folder = StorePath(folder.storage, made)
        self._has_place = False
        self._lock: FileLock | None = None
        self._started_ns = time.time_ns()
        # What is written is not read again.
        self._context = context_of(folder, cache_pool={"total_bytes_limit": 0})
        self._handlers: dict[str, str] = {}
        self._stores: dict[tuple[str, str], Any] = {}
        self._pending: list[tuple[str, Any]] = []
        try:
            with self.failures():
                self._files = ts.KvStore.open(
                    kvstore_of(self._folder), context=self._context
                ).result()
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
            _remove_dead(Path(self._path))
            self._has_place = True
            self._lock = hold_lock_in(Path(str(self._folder)), if_any=True)
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
            others = (made for made in _made_of(Path(self._path)) if made != folder)
            refuse_writers(self._path, me, _writers_of(others))

    def _refuse_existing(self) -> None:
        if self._final.names():
            raise self._taken("is there already")

    def _taken(self, why: str) -> StepExists:
        message = f"{self._final} {why}; choose another place or delete it first"
        return StepExists(message, path=self._path)

    @property
    def aside(self) -> StorePath:
        """Where a checkpoint may lie that is converted; it goes before this one has its name."""
        if self._local:
            return self._folder / ASIDE
        return StorePath(self._final.storage, f"{self._mark}/{ASIDE}")

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
    def failures(self) -> Iterator[None]:
        """Runs a block and flushes; raises what is no error of holdfast's as SaveFailed."""
        try:
            yield
            self.flush()
        except HoldfastError:
            raise
        except Exception as error:
            message = f"{self._final} was not saved: process 0 failed: {error_text(error)}"
            raise SaveFailed(message, path=self._path, process=0) from error

    def add_json(self, item: str, value: Any) -> None:
        """Adds a JSON item, under the names of both versions."""
        self._handlers[item] = JSON_HANDLER
        self._put_json(item, value, ["metadata", "data.json"])

    def _put_json(self, item: str, value: Any, names: Iterable[str]) -> None:
        data = json.dumps(value).encode()
        for name in names:
            self._put(f"{item}/{name}", data)
        self._put(f"{item}/{orbax.COMMITTED}", _MARK)

    def add_record(self, item: ItemRecord) -> list[str]:
        """Adds an item as a record describes it, its arrays still empty; returns the leaves' names
        in Orbax's layout, in their order.
        """
        self._handlers[item.name] = ARRAY_HANDLER if item.tree == 0 else TREE_HANDLER
        entries = stored_entries(item)
        leaves = [leaf for _, leaf in entries if isinstance(leaf, LeafRecord)]
        for name, value in item_files(entries, leaves).items():
            self._put(f"{item.name}/{name}", json.dumps(value).encode())
        arrays = [leaf for leaf in leaves if leaf.kind != "str"]
        self._open(item.name, arrays)
        for leaf in arrays:
            if leaf.value is not None:
                self.write(item.name, leaf.path, np.asarray(leaf.value, leaf.dtype))
        return [leaf.path for leaf in leaves]

    def _open(self, item: str, leaves: Sequence[LeafRecord]) -> None:
        # Each is looked at before one is made: nothing may land after a refusal.
        specs = {leaf.path: array_spec_of(kvstore_of(self._folder / item), leaf) for leaf in leaves}
        first = len(self._pending)
        start = partial(ts.open, context=self._context, create=True, open=False)
        self._start(specs, start, specs.values())
        opened = self._pending[first:]
        refusals = [future.exception() for _, future in opened]  # all have ended then
        del self._pending[first:]
        for (name, future), refused in zip(opened, refusals, strict=True):
            if refused is not None:
                raise SaveFailed(
                    f"'{name}' could not be made in {self._final}: {refused}", path=self._path
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

    def write(self, item: str, name: str, array: HostArray) -> None:
        """Starts writing a leaf; the array must stay as it is until `flush`."""
        write = self._stores[item, name].write
        start = partial(write, can_reference_source_data_indefinitely=True)
        self._start([name], start, [array])

    def flush(self) -> None:
        """Waits for what `write` has started; raises SaveFailed naming the leaf."""
        for name, future in self._pending:
            try:
                future.result()
            except (ValueError, OSError) as error:
                raise SaveFailed(
                    f"'{name}' could not be written to {self._final}: {error}",
                    path=self._path,
                ) from error
        self._pending = []

    def finish(self, *, metrics: Mapping[str, Any] | None = None, metadata: Any = None) -> None:
        """Makes the checkpoint appear, whole."""
        with self.failures():
            for item, handler in self._handlers.items():
                if handler == TREE_HANDLER:
                    self._put(f"{item}/{orbax.COMMITTED}", _MARK)
            if metrics:
                self._put_json("metrics", dict(metrics), ["metrics"])
            about = {
                "item_handlers": self._handlers,
                "metrics": dict(metrics or {}),
                "performance_metrics": {},
                "init_timestamp_nsecs": self._started_ns,
                "commit_timestamp_nsecs": time.time_ns(),
                "custom_metadata": custom_metadata(metadata),
            }
            self._put(orbax.CHECKPOINT_METADATA, json.dumps(about).encode())
            self._remove_aside()
            self._put(orbax.MARKER, _MARK)
            self._put(orbax.COMMITTED, _MARK)
            if self._local:
                self._rename()
            self._leave_place()

    def _remove_aside(self) -> None:
        aside = self.aside
        if self._local:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(str(aside))
            return
        files = aside.storage.list(aside.name, recursive=True, names_only=True)
        aside.storage.delete([entry.name for entry in files])

    def _rename(self) -> None:
        """Gives the checkpoint its name, durably. Raises StepExists where another writer did."""
        os.unlink(Path(str(self._folder), LOCK_NAME))
        try:
            os.rename(str(self._folder), self._path)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise self._taken("was saved by another meanwhile") from error
            raise
        sync_folder(os.path.dirname(self._path))

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
                self._remove_aside()
        self._leave_place()

    def _drain(self) -> None:
        """Waits until nothing is on its way any more."""
        for _, future in self._pending:
            with contextlib.suppress(Exception):  # why the save is abandoned is known
                future.result()
        self._pending = []

    def _put(self, name: str, data: bytes) -> None:
        self._start([name], partial(self._files.write, name), [data])
        self._pending[-1][1].result()
        del self._pending[-1]


def described(item: str, tree: Any) -> tuple[ItemRecord, list[Any]]:
    """Describes a live tree; returns with it what is written of each leaf. Raises
    UnsupportedLeaf.
    """
    description, paths = describe(tree)
    leaves = [live_leaf(path, value) for path, value in zip(paths, flatten(tree)[0], strict=True)]
    record = ItemRecord(item, "tree", (), description, tuple(leaf for leaf, _ in leaves))
    return record, [value for _, value in leaves]


def stored_entries(item: ItemRecord) -> list[Entry]:
    """Returns the leaves of an item as they lie in Orbax's layout, in their order, and its empty
    containers. Raises UnsupportedLeaf for what the layout cannot hold.
    """
    entries = list(walk(item.tree, ()))
    if item.tree == 0:  # one array, which has no name in a tree
        entries = [((("checkpoint", False),), 0)]
    counts = Counter(leaf_name(keys) for keys, what in entries if isinstance(what, int))
    for name, count in counts.items():
        if count > 1:
            raise UnsupportedLeaf(
                f"two leaves are called '{name}' in Orbax's layout; rename one of them", leaf=name
            )
    return [
        (keys, storable(leaf_name(keys), item.leaves[what]) if isinstance(what, int) else what)
        for keys, what in entries
    ]


def check_tree(item: str, tree: Any) -> None:
    """Raises UnsupportedLeaf for a live tree that Orbax's layout cannot hold."""
    for _, leaf in stored_entries(described(item, tree)[0]):
        if isinstance(leaf, LeafRecord) and leaf.kind != "str":
            array_spec_of({"driver": "memory"}, leaf)


def array_spec_of(base: Mapping[str, Any], leaf: LeafRecord) -> ts.Spec:
    """Returns how an array lies in the OCDBT database of its item. Raises UnsupportedLeaf."""
    config = {"max_inline_value_bytes": 1024, "compression": {"id": "zstd"}}
    try:
        return ts.Spec(array_spec({"driver": "ocdbt", "base": base, "config": config}, leaf))
    except ValueError as error:
        raise UnsupportedLeaf(
            f"Orbax's layout cannot hold '{leaf.path}', of {leaf.dtype}; save it as another"
            f" dtype: {error}",
            leaf=leaf.path,
            found=leaf.dtype,
        ) from error


def _remove_dead(final: Path) -> None:
    """Removes what writers of one checkpoint that died have left in a POSIX folder.

    It stays where a free lock does not show that its writer is dead.
    """
    if locks_are_local(final.parent):
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
    for entry in scan_folder(final.parent):
        if entry.name.startswith(f"{final.name}{orbax.TEMPORARY}-") and not entry.is_symlink():
            yield Path(entry)


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
    json_items: Mapping[str, Any],
    metrics: Mapping[str, Any] | None = None,
    metadata: Any = None,
    must_have_joined: bool = False,
) -> None:
    """Saves live trees of this process in Orbax's layout. Blocks until all is durable.

    Raises StepExists, UnsupportedLeaf for what Orbax cannot hold (arrays of size zero, bytes,
    metadata that is no dict),
    SaveFailed; with `must_have_joined` CheckpointError as `refuse_writers`, on a file system.
    """
    metadata = custom_metadata(metadata)
    writer = OrbaxWriter(folder, must_have_joined=must_have_joined)
    try:
        with writer.failures(), own_settings():
            _write_trees(writer, items)
            for item, value in json_items.items():
                writer.add_json(item, value)
        writer.finish(metrics=metrics, metadata=metadata)
    except BaseException:
        writer.abandon()
        raise


def _write_trees(writer: OrbaxWriter, items: Mapping[str, Any]) -> None:
    for item, tree in items.items():
        record, values = described(item, tree)
        names = writer.add_record(record)
        for name, leaf, value in zip(names, record.leaves, values, strict=True):
            if leaf.grid is not None:
                writer.write(item, name, _on_host(name, value))


def _on_host(name: str, value: Any) -> HostArray:
    try:
        return np.asarray(value)
    except jax.errors.JaxRuntimeError as error:
        raise blamed([(name, value)], error) from error
