"""`orbax.checkpoint.handlers`: names that say of what kind an item is. They hold no code that writes: holdfast does."""

from __future__ import annotations

from typing import Any, ClassVar

from . import args as args_lib
from .refusals import not_covered


class Handler:
    """Says with which arguments an item is saved and restored. Options on how bytes lie in files have no effect."""

    save_args: ClassVar[type] = args_lib.StandardSave
    restore_args: ClassVar[type] = args_lib.StandardRestore

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def close(self) -> None:
        """Does nothing."""


class StandardCheckpointHandler(Handler):
    """Trees."""


class PyTreeCheckpointHandler(Handler):
    """Trees, with arguments for each leaf."""

    save_args = args_lib.PyTreeSave
    restore_args = args_lib.PyTreeRestore


class JsonCheckpointHandler(Handler):
    """JSON values."""

    save_args = args_lib.JsonSave
    restore_args = args_lib.JsonRestore


class ArrayCheckpointHandler(Handler):
    """Single arrays."""

    save_args = args_lib.ArraySave
    restore_args = args_lib.ArrayRestore


class JaxRandomKeyCheckpointHandler(Handler):
    """Random keys of jax's."""

    save_args = args_lib.JaxRandomKeySave
    restore_args = args_lib.JaxRandomKeyRestore


class NumpyRandomKeyCheckpointHandler(Handler):
    """Random states of numpy's."""

    save_args = args_lib.NumpyRandomKeySave
    restore_args = args_lib.NumpyRandomKeyRestore


class CompositeCheckpointHandler(Handler):
    """Several items by name, all of them of the handlers above."""

    save_args = args_lib.Composite
    restore_args = args_lib.Composite

    def __init__(self, *item_names: str, composite_options: Any = None, handler_registry: Any = None, **items: Any) -> None:
        if handler_registry is not None:
            raise not_covered("CompositeCheckpointHandler(handler_registry=...)", "name items and their arguments in args.Composite")
        for name, handler in items.items():
            check_handler("CompositeCheckpointHandler", handler, name)


def check_handler(call: str, handler: Any, name: str = "") -> None:
    """Raises for a handler of the caller's own."""
    if handler is not None and not isinstance(handler, Handler):
        item = f" for the item {name!r}" if name else ""
        nearest = "save what it would write as a tree or a Json item, or let holdfast.checkpoint save its files: Files(write)"
        raise not_covered(f"{call} with the handler {type(handler).__name__}{item}", nearest)
