"""Values of v1 that write their own files, and handlers that write them."""

from __future__ import annotations

import pathlib
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from holdfast.checkpoint import Files

from ..handlers import run_to_end, to_path
from .options import Context, current
from .registry import STANDARD, global_registry

T = TypeVar("T")
A = TypeVar("A")


class PathAwaitingCreation:
    """The folder that a checkpointable writes into. It is there already."""

    def __init__(self, path: Any) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """The folder's name."""
        return str(self.path.name)

    async def await_creation(self) -> Any:
        """Returns the folder's path."""
        return self.path

    def __truediv__(self, name: str) -> PathAwaitingCreation:
        return PathAwaitingCreation(self.path / name)


@runtime_checkable
class StatefulCheckpointable(Protocol):
    """A value that writes its own files, and reads them back into itself.

    What either method returns is awaited.
    """

    async def save(self, directory: Any) -> Awaitable[None] | None:
        """Writes files."""
        ...

    async def load(self, directory: Any) -> Awaitable[None] | None:
        """Reads the files that `save` wrote."""
        ...


class CheckpointableHandler(Generic[T, A]):
    """The base of v1's handlers.

    They have `save(directory, value)`, `load(directory, abstract)`, `is_handleable(value)` and
    `is_abstract_handleable(abstract)`.
    """


def register_handler(
    cls: Any, *, checkpointable_name: str | None = None, secondary_typestrs: Any = None
) -> Any:
    """Registers a class of v1's handlers, for one item or (None) for all.

    Of several that can handle a value the last one does. Raises AlreadyExistsError (a ValueError).
    """
    global_registry().add(
        cls, checkpointable_name=checkpointable_name, secondary_typestrs=secondary_typestrs
    )
    return cls


def _entries(context: Context | None) -> list[tuple[str | None, Any]]:
    """Returns the handlers that hold in a context, the last one first."""
    registry = current(context).registry or global_registry()
    return [(name, cls) for cls, name in reversed(registry.get_all_entries())]


def _find(name: str, can: Callable[[Any], Any], context: Context | None) -> Any:
    """Returns the handler of an item: its own, else one for all items that can handle it."""
    entries = _entries(context)
    for chosen, cls in entries:
        if chosen == name:
            return cls()
    handlers = (cls() for chosen, cls in entries if chosen is None and cls not in STANDARD)
    return next((handler for handler in handlers if can(handler)), None)


def checkpointable_to_save(name: str, value: Any, context: Context | None = None) -> Any:
    """Returns a value for `save(items=...)`: files, where it or a handler writes them.

    Else the value itself.
    """
    handler = _find(name, lambda handler: handler.is_handleable(value), context)
    if isinstance(handler, STANDARD):
        return handler.item(value)
    if handler is None and not isinstance(value, StatefulCheckpointable):
        return value

    async def write(directory: PathAwaitingCreation) -> None:
        if handler is None:
            rest = await value.save(directory)
        else:
            rest = await handler.save(directory, value)
        if rest is not None:
            await rest

    def write_into(folder: pathlib.Path) -> None:
        run_to_end(write(PathAwaitingCreation(to_path(folder))))

    return Files(write_into, shared=True)


def checkpointable_to_load(name: str, target: Any, context: Context | None = None) -> Files | None:
    """Returns the `like` by which an item of files is loaded, None where nobody knows how.

    Without a target it is the handler that was registered for that item, or the only one that is
    registered for all.
    """
    if target is None:
        own = [(chosen, cls) for chosen, cls in _entries(context) if cls not in STANDARD]
        by_item = [cls for chosen, cls in own if chosen == name]
        for_all = [cls for chosen, cls in own if chosen is None]
        classes = set(by_item or for_all)
        handler = classes.pop()() if len(classes) == 1 else None
    else:
        handler = _find(name, lambda handler: handler.is_abstract_handleable(target), context)
    if isinstance(handler, STANDARD):
        handler = None
    if handler is None and not isinstance(target, StatefulCheckpointable):
        return None

    async def read(directory: Any) -> Any:
        if handler is None:
            rest = await target.load(directory)
        else:
            rest = await handler.load(directory, target)
        value = None if rest is None else await rest
        return target if handler is None else value

    return Files(read=lambda folder: run_to_end(read(to_path(folder))))
