"""Values of v1 that write their own files, and handlers that write them."""

from __future__ import annotations

import pathlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from holdfast.checkpoint import Files
from holdfast.multihost import is_primary_host

from ..own_handlers import run_to_end, to_path
from ..refusals import PAGE
from .options import Context, current
from .registry import STANDARD, PyTreeHandler, global_registry
from .storing import cast_to_store

# Beside the files of a handler: the name of its class. Handlers do not see it.
SAVED_BY = ".saved-by-handler"
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
    entries = current(context).registry.get_all_entries()
    return [(name, cls) for cls, name in reversed(entries)]


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
    if isinstance(handler, PyTreeHandler):
        return cast_to_store(value, current(context))
    if isinstance(handler, STANDARD):
        return handler.item(value)
    if handler is None and not isinstance(value, StatefulCheckpointable):
        return cast_to_store(value, current(context))

    def write_into(folder: pathlib.Path) -> None:
        directory = PathAwaitingCreation(to_path(folder))
        if handler is None:
            _run(lambda: value.save(directory))
        else:
            _run(lambda: handler.save(directory, value))
        if handler is not None and is_primary_host(0):
            (folder / SAVED_BY).write_text(_typestr(type(handler)))

    return Files(write_into, shared=True)


def _run(begin: Callable[[], Any]) -> Any:
    """Returns what a method returns whose work is begun by one `await` and ended by another."""

    async def run() -> Any:
        rest = await begin()
        return None if rest is None else await rest

    return run_to_end(run())


def _typestr(cls: type) -> str:
    """Returns the name of a class of handlers, as Orbax forms it."""
    return f"{cls.__module__}.{cls.__qualname__}"


def checkpointable_to_load(name: str, target: Any, context: Context | None = None) -> Files | None:
    """Returns the `like` by which an item of files is loaded, None where nobody knows how.

    Without a target it is the handler that was registered for that item, or the one that saved it.
    """
    registry = current(context).registry
    if target is None:
        classes = _classes_for(name, context)
        if not classes:
            return None
        return Files(read=lambda folder: _load(_saved_by(folder, name, classes, registry), folder))
    handler = _find(name, lambda handler: handler.is_abstract_handleable(target), context)
    if handler is not None and not isinstance(handler, STANDARD):
        return Files(read=lambda folder: _load(handler, folder, target))
    if isinstance(target, StatefulCheckpointable):
        return Files(read=lambda folder: _load_into(target, folder))
    return None


def _classes_for(name: str, context: Context | None) -> list[Any]:
    """Returns the classes of handlers that may read an item: its own, or those for all items."""
    own = [(chosen, cls) for chosen, cls in _entries(context) if cls not in STANDARD]
    by_item = [cls for chosen, cls in own if chosen == name]
    return by_item[:1] or [cls for chosen, cls in own if chosen is None]


def _saved_by(folder: pathlib.Path, name: str, classes: Sequence[Any], registry: Any) -> Any:
    """Returns the handler of an item by what its files say. Raises ValueError."""
    if len(classes) == 1:
        return classes[0]()
    note = folder / SAVED_BY
    saved_by = note.read_text() if note.exists() else "a handler that is not noted"
    for cls in classes:
        if saved_by in (_typestr(cls), *registry.get_secondary_typestrs(cls)):
            return cls()
    raise ValueError(
        f"the item {name!r} was saved by {saved_by}, which is none of"
        f" {', '.join(map(_typestr, classes))}; register it, handlers.register_handler, or one with"
        f" that name among its secondary_typestrs. See {PAGE}"
    )


def _load(handler: Any, folder: pathlib.Path, target: Any = None) -> Any:
    (folder / SAVED_BY).unlink(missing_ok=True)
    return _run(lambda: handler.load(to_path(folder), target))


def _load_into(target: Any, folder: pathlib.Path) -> Any:
    _run(lambda: target.load(to_path(folder)))
    return target
