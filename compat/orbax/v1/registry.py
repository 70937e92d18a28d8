"""Registries of v1's handlers: who saves and loads an item."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.checkpoint import Json

from ..handling.items import json_of_primary
from ..handling.registry import AlreadyExistsError, NoEntryError
from ..refusals import check_options


class CheckpointableHandlerRegistry:
    """Classes of handlers, for one item or (None) for all. Of several the last one counts."""

    def __init__(self) -> None:
        # By class and item: other names by which steps may know the class.
        self._entries: dict[tuple[type, str | None], Sequence[str]] = {}

    def add(
        self,
        handler_type: type,
        *,
        checkpointable_name: str | None = None,
        secondary_typestrs: Sequence[str] | None = None,
    ) -> CheckpointableHandlerRegistry:
        """Adds a class of handlers and returns the registry.

        Raises AlreadyExistsError where the item, or without one the class, has an entry.
        """
        if not isinstance(handler_type, type):
            raise ValueError(f"handler_type: expected a class of handlers, found {handler_type}")
        if checkpointable_name and self.has(checkpointable_name):
            raise AlreadyExistsError(
                f"{checkpointable_name!r} has its handlers already: {self.get(checkpointable_name)}"
            )
        if not checkpointable_name and any(cls is handler_type for cls, _ in self._entries):
            raise AlreadyExistsError(f"{handler_type} was added before")
        self._entries[handler_type, checkpointable_name] = secondary_typestrs or ()
        return self

    def get(self, checkpointable_name: str) -> type:
        """Returns the class of handlers of an item. Raises NoEntryError."""
        for cls, name in self._entries:
            if name == checkpointable_name:
                return cls
        raise NoEntryError(f"no handlers were added for {checkpointable_name!r}")

    def has(self, checkpointable_name: str) -> bool:
        """Says whether an item has handlers of its own."""
        return any(name == checkpointable_name for _, name in self._entries)

    def get_all_entries(self) -> Sequence[tuple[type, str | None]]:
        """Returns the classes of handlers, each with its item (None: any)."""
        return list(self._entries)

    def get_secondary_typestrs(self, handler_type: type) -> Sequence[str]:
        """Returns other names by which steps may know a class of handlers."""
        entries = self._entries.items()
        return [name for (cls, _), names in entries if cls is handler_type for name in names]

    def add_all(self, other: Any) -> CheckpointableHandlerRegistry:
        """Adds all entries of another registry and returns this one."""
        for cls, name in other.get_all_entries():
            self.add(
                cls,
                checkpointable_name=name,
                secondary_typestrs=other.get_secondary_typestrs(cls),
            )
        return self


class PyTreeHandler:
    """Trees: as an item's own handler it says that the item is one. Options have no effect."""

    def __init__(self, **options: Any) -> None:
        known = "context array_metadata_validator leaf_handler_registry partial_save_mode"
        check_options("PyTreeHandler", options, known)

    @staticmethod
    def item(value: Any) -> Any:
        """Returns a value for `save(items=...)`."""
        return value


class JsonHandler:
    """JSON values: as an item's own handler it says that the item is one."""

    def __init__(self, filename: str | None = None) -> None:
        pass

    @staticmethod
    def item(value: Any) -> Json:
        """Returns a value for `save(items=...)`."""
        return json_of_primary(value)


STANDARD = (JsonHandler, PyTreeHandler)


def _new_registry() -> CheckpointableHandlerRegistry:
    registry = CheckpointableHandlerRegistry().add(JsonHandler).add(PyTreeHandler)
    return registry.add(PyTreeHandler, checkpointable_name="state")


_global = _new_registry()


def global_registry() -> CheckpointableHandlerRegistry:
    """Returns the registry that `register_handler` adds to."""
    return _global


def local_registry(
    other_registry: Any = None, *, include_global_registry: bool = True
) -> CheckpointableHandlerRegistry:
    """Returns a registry for `Context.checkpointables.registry`.

    It has the entries of the global one, unless told otherwise, and of another.
    """
    registry = CheckpointableHandlerRegistry()
    if include_global_registry:
        registry.add_all(global_registry())
    if other_registry is not None:
        registry.add_all(other_registry)
    return registry
