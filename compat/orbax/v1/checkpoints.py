"""v1's functions on one checkpoint: save, load, metadata, delete."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax

import holdfast.compat.orbax.args as args_lib
import holdfast.compat.orbax.handling.items as items_lib
from holdfast.checkpoint import (
    CheckpointError,
    StepNotFound,
    Structure,
    UnsupportedLeaf,
    structure,
)
from holdfast.checkpoint import load as native_load
from holdfast.checkpoint import save_async as native_save_async
from holdfast.checkpoint.layouts.detect import find_checkpoint
from holdfast.checkpoint.storage.path import absolute, open_storage
from holdfast.multihost import is_primary_host, sync_global_processes

from ..checkpointers import files_to_replace
from ..handling.items import SavedItem, orbax_errors
from ..handling.registry import NoEntryError
from ..metadata import with_text_keys
from ..refusals import PAGE, not_covered
from .checkpointables import checkpointable_to_load, checkpointable_to_save
from .errors import InvalidLayoutError
from .options import Context, current
from .results import AsyncResponse, CheckpointMetadata, describe, tree_of

AUTO = "AUTO"
STATE = "state"
USUAL = (STATE, "pytree", "default")
PLACEHOLDER = items_lib.PLACEHOLDER


def to_items(checkpointables: Mapping[str, Any], context: Context | None = None) -> dict[str, Any]:
    """Returns checkpointables for `save(items=...)`."""
    return {
        name: checkpointable_to_save(name, value, context)
        for name, value in checkpointables.items()
    }


@contextlib.contextmanager
def handled(checkpointables: Mapping[str, Any]) -> Iterator[None]:
    """Raises NoEntryError (a KeyError) for a checkpointable that has no handler: without one of its
    name, a tree is one of leaves that are known.
    """
    try:
        yield
    except ValueError as error:
        cause = error.__cause__
        alone = [
            name
            for name, value in checkpointables.items()
            if not all(map(_is_of_a_tree, jax.tree_util.tree_leaves(value)))
            and not current().registry.has(name)
        ]
        if isinstance(cause, UnsupportedLeaf) and alone:
            raise NoEntryError(
                f"no handler for the checkpointable {', '.join(map(repr, alone))}: {cause}; or"
                f" register one, handlers.register_handler. See {PAGE}"
            ) from cause
        raise


def _is_of_a_tree(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") or isinstance(leaf, int | float | complex | str | bytes)


def save_checkpointables(path: Any, checkpointables: Mapping[str, Any], **options: Any) -> None:
    """Saves several trees as one checkpoint; blocks until it is durable.

    Takes and raises what `save_checkpointables_async` does.
    """
    save_checkpointables_async(path, checkpointables, **options).result()


def save_checkpointables_async(
    path: Any,
    checkpointables: Mapping[str, Any],
    *,
    overwrite: bool = False,
    custom_metadata: Any = None,
) -> AsyncResponse[None]:
    """Begins to save several trees as one checkpoint; the arrays may be changed when it returns.

    Raises ValueError where one is there, KeyError for what is no tree and has no handler.
    """
    replaced = files_to_replace(path, overwrite)
    with handled(checkpointables), orbax_errors():
        handle = native_save_async(
            path,
            items=to_items(checkpointables),
            overwrite=overwrite,
            metadata=with_text_keys(custom_metadata),
            timeout_s=current().timeout_s,
        )
    if replaced:
        folder = absolute(path)
        handle.on_commit(lambda _: open_storage(folder).delete(replaced))
    return AsyncResponse.of(handle, None)


def save(path: Any, state: Any, *, checkpointable_name: str = STATE, **options: Any) -> None:
    """Saves a tree; blocks until it is durable. Else as `save_checkpointables_async`."""
    save_checkpointables(path, {checkpointable_name: state}, **options)


def save_async(
    path: Any, state: Any, *, checkpointable_name: str = STATE, **options: Any
) -> AsyncResponse[None]:
    """Begins `save`; the arrays may be changed when it returns."""
    return save_checkpointables_async(path, {checkpointable_name: state}, **options)


def _open(path: Any) -> Structure:
    try:
        return structure(path)
    except StepNotFound as error:
        raise InvalidLayoutError(str(error)) from error


def pick(saved: Structure, name: str | None) -> str:
    """Returns the name of the tree that is meant: itself, a usual one, or the only one.

    Raises KeyError.
    """
    if name not in (None, AUTO):
        return str(name)
    trees = [each for each, item in saved.items.items() if item.kind == "tree"]
    usual = [each for each in USUAL if each in trees]
    if not usual and len(trees) != 1:
        raise KeyError(
            f"{saved.path} has no item called {', '.join(USUAL)}; it has {sorted(saved.items)}:"
            " name one by checkpointable_name"
        )
    return usual[0] if usual else trees[0]


def _metadata_or(target: Any) -> Any:
    return target.metadata if isinstance(target, CheckpointMetadata) else target


def _load_item(item: SavedItem, target: Any, context: Context) -> Any:
    """Loads an item of a checkpoint like `target` (or its metadata); None: as it was saved."""
    target = _metadata_or(target)
    if item.kind == "files":
        like = checkpointable_to_load(item.name, target, context)
        if like is None:
            raise ValueError(
                f"{item.call}: the item {item.name!r} is of files, and {type(target).__name__} does"
                " not say who reads them; expected the object that saved them, or a handler:"
                f" handlers.register_handler. See {PAGE}"
            )
        return item.read(like)
    if target is None:
        return items_lib.restore_item(item, None)
    if item.kind != "tree":
        return items_lib.restore_item(item, args_lib.StandardRestore(target))
    return items_lib.restore_tree(
        item, target, fits_shapes=context.fits_shapes, partial=context.partial_load
    )


def load(path: Any, abstract_state: Any = None, *, checkpointable_name: str | None = AUTO) -> Any:
    """Loads a tree.

    Raises InvalidLayoutError (a ValueError) where there is no checkpoint, ValueError where the
    target does not fit.
    """
    saved = _open(path)
    name = pick(saved, checkpointable_name)
    with orbax_errors():
        item = SavedItem.find("load", saved, name, partial(native_load, saved.path))
        return _load_item(item, abstract_state, current())


def load_async(
    path: Any, abstract_state: Any = None, *, checkpointable_name: str | None = STATE
) -> AsyncResponse[Any]:
    """Loads as `load` does, blocking; the response is done."""
    state = load(path, abstract_state, checkpointable_name=checkpointable_name)
    return AsyncResponse.done(state)


def load_all(
    call: str, saved: Structure, targets: Any, context: Context, *, reader: Callable[..., Any]
) -> dict[str, Any]:
    """Loads several items: those of `targets`, or all."""
    targets = _metadata_or(targets)
    wanted = dict.fromkeys(saved.items) if targets is None else targets
    return {
        name: _load_item(SavedItem.find(call, saved, name, reader), target, context)
        for name, target in wanted.items()
    }


def load_checkpointables(path: Any, abstract_checkpointables: Any = None) -> dict[str, Any]:
    """Loads several items by name; None: all.

    Raises as `load` does, KeyError for an item that is not there.
    """
    saved = _open(path)
    reader = partial(native_load, saved.path)
    with orbax_errors():
        return load_all(
            "load_checkpointables", saved, abstract_checkpointables, current(), reader=reader
        )


def load_checkpointables_async(
    path: Any, abstract_checkpointables: Any = None
) -> AsyncResponse[dict[str, Any]]:
    """Loads as `load_checkpointables` does, blocking; the response is done."""
    return AsyncResponse.done(load_checkpointables(path, abstract_checkpointables))


def metadata(path: Any, checkpointable_name: str | None = AUTO) -> CheckpointMetadata[Any]:
    """Returns what is known of a tree, without reading it: a target."""
    return describe_tree(_open(path), checkpointable_name)


def describe_tree(
    saved: Structure, name: str | None = AUTO, *, step: int | None = None
) -> CheckpointMetadata[Any]:
    """Returns what is known of the tree that is meant by `name`."""
    item = items_lib.item_of(saved, pick(saved, name))
    return describe(saved, tree_of(item), step=step)


def checkpointables_metadata(path: Any) -> CheckpointMetadata[dict[str, Any]]:
    """Returns what is known of all items, without reading them."""
    return describe_all(_open(path))


def describe_all(
    saved: Structure, *, step: int | None = None
) -> CheckpointMetadata[dict[str, Any]]:
    """Returns what is known of all items."""
    trees = {
        name: tree_of(item) if item.kind == "tree" and item.error is None else None
        for name, item in saved.items.items()
    }
    return describe(saved, trees, step=step)


def is_orbax_checkpoint(path: Any) -> bool:
    """Says whether `load` can read it: a checkpoint of Orbax's or of holdfast's is there."""
    try:
        folder, layout = find_checkpoint(open_storage(path))
    except (CheckpointError, OSError):
        return False
    return not folder.name and layout.name in ("orbax", "holdfast")


def delete(path: Any, *, checkpointable_name: str | None = None, missing_ok: bool = False) -> bool:
    """Deletes a checkpoint in a folder of the file system; True if one was there.

    Every process calls it. Raises FileNotFoundError.
    """
    if checkpointable_name is not None or "://" in os.fspath(path):
        raise not_covered(
            "delete of an item, or in an object store",
            "delete whole steps by training.Checkpointer.delete",
        )
    there = is_orbax_checkpoint(path)
    sync_global_processes("holdfast.compat.orbax.v1.delete")  # all have looked
    if not there and not missing_ok:
        raise FileNotFoundError(f"Checkpoint does not exist: {path}.")
    try:
        if there and is_primary_host(0):
            shutil.rmtree(absolute(path))
    finally:
        sync_global_processes("holdfast.compat.orbax.v1.deleted")  # it is gone for all
    return there


def delete_async(path: Any, **options: Any) -> AsyncResponse[bool]:
    """Deletes as `delete` does, blocking; the response is done."""
    return AsyncResponse.done(delete(path, **options))
