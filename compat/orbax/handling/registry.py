"""Registries of v0's handlers: which class of arguments an item takes, and whose it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import holdfast.compat.orbax.args as args_lib
import holdfast.compat.orbax.handling.standard as standard

# Orbax's own handlers: their arguments need no registration.
_STANDARD = (
    standard.ArrayCheckpointHandler,
    standard.JaxRandomKeyCheckpointHandler,
    standard.JsonCheckpointHandler,
    standard.NumpyRandomKeyCheckpointHandler,
    standard.PyTreeCheckpointHandler,
    standard.StandardCheckpointHandler,
)


class AlreadyExistsError(ValueError):
    """The item has an entry for these arguments, or handlers."""


class NoEntryError(KeyError):
    """The item has none."""


class DefaultCheckpointHandlerRegistry:
    """Handlers by item and class of arguments; those of no item (None) are for all others."""

    def __init__(self, other_registry: Any = None) -> None:
        self._entries: dict[tuple[str | None, type], Any] = {}
        if other_registry is not None:
            for (item, args), handler in other_registry.get_all_entries().items():
                self.add(item, args, handler)

    def add(self, item: str | None, args: Any, handler: Any = None) -> None:
        """Adds a handler, or a class of handlers, for an item and a class of arguments.

        Without one it is the handler whose arguments they are. Raises AlreadyExistsError, and
        ValueError where no handler has such arguments.
        """
        cls = _class_of(args)
        if self.has(item, cls):
            raise AlreadyExistsError(f"the item {item!r} has a handler for {cls.__name__} already")
        chosen = _handler_of_args(cls) if handler is None else handler
        self._entries[item, cls] = chosen() if isinstance(chosen, type) else chosen

    def get(self, item: str | None, args: Any) -> Any:
        """Returns the handler of an item and a class of arguments. Raises NoEntryError."""
        cls = _class_of(args)
        if not self.has(item, cls):
            raise NoEntryError(f"the item {item!r} has no handler for {cls.__name__}")
        return self._entries[item, cls]

    def has(self, item: str | None, args: Any) -> bool:
        """Says whether an item has a handler for a class of arguments."""
        return (item, _class_of(args)) in self._entries

    def get_all_entries(self) -> dict[tuple[str | None, type], Any]:
        """Returns the handlers by item and class of arguments."""
        return self._entries

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._entries})"


CheckpointHandlerRegistry = DefaultCheckpointHandlerRegistry


def create_default_handler_registry(**items: Any) -> DefaultCheckpointHandlerRegistry:
    """Returns a registry of handlers by item, each with its arguments to save and to restore."""
    registry = DefaultCheckpointHandlerRegistry()
    for item, handler in items.items():
        for args in _args_of_handler(handler):
            registry.add(item, args, handler)
    return registry


def check_args(registry: Any, given: Mapping[str, Any]) -> None:
    """Raises ValueError for an item whose arguments are none of those that its entries name."""
    entries = registry.get_all_entries()
    for item, args in given.items():
        expected = [cls.__name__ for name, cls in entries if name == item]
        if args is not None and expected and not registry.has(item, args):
            raise ValueError(
                f"the item {item!r}: expected {' or '.join(expected)}, found {args!r:.60}"
            )


def handler_in(registry: Any, item: str, args: Any) -> Any:
    """Returns the handler that a registry has for an item and its arguments, None for none."""
    if registry is None or args is None:
        return None
    for name in (item, None):
        if registry.has(name, args):
            return registry.get(name, args)
    return None


def _class_of(args: Any) -> type:
    return args if isinstance(args, type) else type(args)


def _handler_of_args(args: type) -> type:
    for cls in _STANDARD:
        if args in (cls.save_args, cls.restore_args):
            return cls
    return args_lib.get_registered_handler_cls(args)


def _args_of_handler(handler: Any) -> tuple[type, ...]:
    if isinstance(handler, standard.Handler) and not args_lib.has_registered_args(handler):
        return handler.save_args, handler.restore_args
    return args_lib.get_registered_args_cls(handler)
