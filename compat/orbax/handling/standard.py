"""Orbax's own handlers: each says of what kind an item is.

A subclass may override how one saves or restores. Its method then runs around the base's: what it
gives to `super().save` is saved as the item, and `super().restore` gives it what was saved.
"""

from __future__ import annotations

import contextvars
import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import holdfast.compat.orbax.args as args_lib
import holdfast.compat.orbax.handling.items as items_lib
from holdfast.checkpoint import SaveHandle, Structure, load, save_async, structure
from holdfast.checkpoint.layouts.detect import layout_of
from holdfast.checkpoint.storage.path import StorePath, split

from ..args import CheckpointArgs, CheckpointHandler, handler_of_args
from ..metadata import item_metadata_of, with_item_metadata
from ..own_handlers import (
    arguments,
    call_restore,
    call_save,
    files_to_restore,
    files_to_save,
    handler_for,
    is_own,
    run_to_end,
    to_path,
)
from ..refusals import check_options, not_covered, refuse
from .items import DEFAULT_ITEM, SavedItem, orbax_errors

# What a handler is called for: to say what to save, or to restore. None: it is called by itself.
_saving: contextvars.ContextVar[list[CheckpointArgs] | None]
_saving = contextvars.ContextVar("saving", default=None)
_restoring: contextvars.ContextVar[SavedItem | None]
_restoring = contextvars.ContextVar("restoring", default=None)


@dataclass(frozen=True)
class SaveFuture:
    """The end of a save in the background."""

    handle: SaveHandle

    def result(self, timeout: float | None = None) -> None:
        """Blocks until the checkpoint is durable; raises the error of a save that failed."""
        with orbax_errors():
            self.handle.wait(timeout)


class Handler(CheckpointHandler):
    """Names the arguments by which an item is saved and restored.

    Options on how bytes lie in files have no effect. Called by itself it saves a checkpoint of
    holdfast's into a folder.
    """

    has_item = True
    save_args: ClassVar[type] = args_lib.StandardSave
    restore_args: ClassVar[type] = args_lib.StandardRestore

    # How bytes lie in files: of no effect.
    options: ClassVar[str] = ""

    def __init__(self, *args: Any, **options: Any) -> None:
        check_options(type(self).__name__, options, self.options)

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        """Saves an item; blocks until it is durable."""
        for future in run_to_end(self.async_save(directory, *args, **kwargs)):
            future.result()

    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Begins to save an item; returns futures that end when it is durable."""
        given = self.arguments("save", args, kwargs)
        asked = _saving.get()
        if asked is not None:
            asked.append(given)
            return []
        call = f"{type(self).__name__}.save"
        with orbax_errors():
            items, metadata = items_to_save(call, self, given)
            return [SaveFuture(save_async(directory, items=items, metadata=metadata))]

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Restores an item."""
        given = self.arguments("restore", args, kwargs)
        asked = _restoring.get()
        if asked is not None:
            return items_lib.restore_item(asked, given)
        return restore_folder(f"{type(self).__name__}.restore", directory, self, given)

    def metadata(self, directory: Any) -> Any:
        """Returns what is known of an item without reading it."""
        with orbax_errors():
            return folder_metadata(*find_folder(directory), self)

    def handler_of(self, item: str) -> Any:
        """Returns the handler of an item in a folder of its own: this one."""
        return self

    def arguments(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckpointArgs:
        """Returns the arguments of a call: `args=...`, one of them by position, or what makes
        them.
        """
        given: CheckpointArgs = arguments(self, verb, args, kwargs)
        if handler_of_args(type(given)) is None:
            return given
        return _like_usual(self.save_args if verb == "save" else self.restore_args, given)


def _like_usual(usual: type, given: CheckpointArgs) -> CheckpointArgs:
    """Returns arguments of the usual class with what those of a subclass's own have of it."""
    names = [each.name for each in dataclasses.fields(usual)]
    made: CheckpointArgs = usual(
        **{name: getattr(given, name) for name in names if hasattr(given, name)}
    )
    return made


class StandardCheckpointHandler(Handler):
    """Trees."""

    options = (
        "save_concurrent_gb restore_concurrent_gb multiprocessing_options pytree_metadata_options"
        " use_ocdbt"
    )


class PyTreeCheckpointHandler(Handler):
    """Trees, with arguments for each leaf."""

    save_args = args_lib.PyTreeSave
    restore_args = args_lib.PyTreeRestore
    options = (
        "aggregate_filename save_concurrent_gb restore_concurrent_gb save_device_host_concurrent_gb"
        " memory_limit_options use_ocdbt use_zarr3 use_compression multiprocessing_options"
        " type_handler_registry pytree_metadata_options array_metadata_validator"
        " enable_pinned_host_transfer is_prioritized_key_fn"
    )

    def __init__(self, *args: Any, handler_impl: Any = None, **options: Any) -> None:
        refuse(
            type(self).__name__,
            "override save and restore of a subclass of PyTreeCheckpointHandler",
            handler_impl=handler_impl,
        )
        super().__init__(*args, **options)


class JsonCheckpointHandler(Handler):
    """JSON values."""

    save_args = args_lib.JsonSave
    restore_args = args_lib.JsonRestore
    options = "filename multiprocessing_options"


class ArrayCheckpointHandler(Handler):
    """Single arrays."""

    save_args = args_lib.ArraySave
    restore_args = args_lib.ArrayRestore
    options = "checkpoint_name"


class JaxRandomKeyCheckpointHandler(Handler):
    """Random keys of jax's."""

    save_args = args_lib.JaxRandomKeySave
    restore_args = args_lib.JaxRandomKeyRestore
    options = "key_name"


class NumpyRandomKeyCheckpointHandler(Handler):
    """Random states of numpy's."""

    save_args = args_lib.NumpyRandomKeySave
    restore_args = args_lib.NumpyRandomKeyRestore
    options = "key_name"


def handlers_by_item(registry: Any) -> dict[str, Any]:
    """Returns the handlers of the items that a registry names."""
    entries = {} if registry is None else registry.get_all_entries()
    return {item: handler for (item, _), handler in entries.items() if item is not None}


class CompositeCheckpointHandler(Handler):
    """Several items by name, of the handlers above or of one's own."""

    save_args = args_lib.Composite
    restore_args = args_lib.Composite

    def __init__(
        self,
        *item_names: str,
        composite_options: Any = None,
        handler_registry: Any = None,
        **items: Any,
    ) -> None:
        items = handlers_by_item(handler_registry) | items
        for name, handler in items.items():
            check_handler("CompositeCheckpointHandler", handler, name)
        self.handlers = items

    def handler_of(self, item: str) -> Any:
        """Returns the handler that was given for an item, None where there was none."""
        return self.handlers.get(item)


def check_handler(call: str, handler: Any, name: str = "") -> None:
    """Raises for what is no handler: neither of those above nor one that saves by itself."""
    item = f" for the item {name!r}" if name else ""
    if isinstance(handler, CompositeCheckpointHandler) and _overridden(handler):
        raise not_covered(
            f"{call} with {type(handler).__name__}, which overrides a composite's methods{item}",
            "override those of the items' handlers",
        )
    if handler is not None and not isinstance(handler, Handler) and not is_own(handler):
        nearest = "give it the methods save(directory, args=...) and restore(directory, args=...)"
        raise not_covered(f"{call} with the handler {type(handler).__name__}{item}", nearest)


def _overridden(handler: Any) -> list[str]:
    """Returns the methods of `Handler` that a handler's class overrides."""
    methods = ("async_save", "save", "restore")
    cls = type(handler)
    return [name for name in methods if getattr(cls, name) is not getattr(Handler, name)]


# --- items by their handlers


def items_to_save(
    call: str, handler: Any, given: Any, metadata: Any = None
) -> tuple[dict[str, Any], Any]:
    """Returns what `save(items=..., metadata=...)` takes for a folder; its handler is of those
    above, or one's own.
    """
    several = given if isinstance(given, args_lib.Composite) else {DEFAULT_ITEM: given}
    of_item = handler.handler_of if isinstance(handler, Handler) else lambda name: handler
    items = {name: to_save(call, each, of_item(name)) for name, each in several.items()}
    return items, with_item_metadata(metadata, several)


def to_save(call: str, args: Any, handler: Any = None) -> Any:
    """Returns an item for `save(items=...)`; `handler` is the one that was given for it."""
    chosen = handler_for(handler, args)
    if is_own(chosen):
        return files_to_save(chosen, args)
    if isinstance(chosen, Handler):
        overrides = {"async_save", "save"} & {*_overridden(chosen)}
        args = _asked_to_save(chosen, args) if overrides else chosen.arguments("save", (args,), {})
    return items_lib.to_save(call, args)


def _asked_to_save(handler: Handler, args: Any) -> CheckpointArgs:
    """Returns the arguments that a handler's override gives to the base's method."""
    asked: list[CheckpointArgs] = []
    token = _saving.set(asked)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            folder = pathlib.Path(scratch, DEFAULT_ITEM)
            folder.mkdir()
            background = "async_save" in _overridden(handler)
            call_save(handler, folder, args, background=background)
            beside = sorted(os.listdir(folder))
    finally:
        _saving.reset(token)
    if len(asked) == 1 and not beside:
        return asked[0]
    did = f"writes {beside[0]}" if beside else f"calls the base's {len(asked)} times"
    raise not_covered(
        f"{type(handler).__name__}.save, which {did}",
        "call super().save once and write nothing else, or subclass CheckpointHandler",
    )


def restore_item(item: SavedItem, args: Any, handler: Any, directory: Any) -> Any:
    """Restores an item as its arguments ask for; `handler` is the one that was given for it."""
    chosen = handler_for(handler, args)
    if item.kind == "files":
        if is_own(chosen):
            return item.read(files_to_restore(chosen, args))
        raise not_covered(
            f"{item.call}: the item {item.name!r}, of a handler that only its writer knows",
            f"give it: CheckpointManager(item_handlers={{{item.name!r}: handler}}), or restore the"
            " files with holdfast.checkpoint.load",
        )
    if isinstance(chosen, Handler) and "restore" in _overridden(chosen):
        token = _restoring.set(item)
        try:
            return call_restore(chosen, directory, args)
        finally:
            _restoring.reset(token)
    if isinstance(chosen, Handler) and args is not None:
        args = chosen.arguments("restore", (args,), {})
    return items_lib.restore_item(item, args)


def restore_folder(call: str, directory: Any, handler: Any, given: Any) -> Any:
    """Restores the checkpoint in a folder: its only item, or a Composite of several."""
    with orbax_errors():
        saved, name = find_folder(directory)
        of_item = handler.handler_of if isinstance(handler, Handler) else lambda name: handler

        def restored(item_name: str, args: Any) -> Any:
            item = SavedItem.find(call, saved, item_name, partial(load, saved.path))
            return restore_item(item, args, of_item(item_name), to_path(saved.path) / item_name)

        if name is None and isinstance(handler, CompositeCheckpointHandler):
            wanted = given if isinstance(given, Mapping) and given else dict.fromkeys(saved.items)
            return args_lib.Composite(
                **{name: restored(name, args) for name, args in wanted.items()}
            )
        return restored(name or only_item(saved.items), given)


def find_folder(directory: Any) -> tuple[Structure, str | None]:
    """Returns the checkpoint of a folder; with its name, where the folder is an item of a step."""
    layout = layout_of(StorePath.of(directory))
    if layout is None or layout.name not in ("holdfast", "orbax"):
        step, name = split(os.fspath(directory))
        above = layout_of(StorePath.of(step))
        if above is not None and above.name == "holdfast":
            saved = structure(step)
            if name in saved.items:
                return saved, name
    return structure(directory), None


def only_item(items: Mapping[str, Any]) -> str:
    """Returns the name of a folder's only item, or the usual one."""
    return DEFAULT_ITEM if DEFAULT_ITEM in items or len(items) != 1 else next(iter(items))


def folder_metadata(saved: Structure, name: str | None, handler: Any) -> Any:
    """Returns what is known of an item, of a folder's only one, or a Composite of several."""
    if name is None and isinstance(handler, CompositeCheckpointHandler):
        return args_lib.Composite(**items_lib.trees_metadata(saved))
    chosen = name or only_item(saved.items)
    item = items_lib.item_of(saved, chosen)
    about = item_metadata_of(saved, chosen)
    return items_lib.tree_metadata(item, to_path(saved.path), about)
