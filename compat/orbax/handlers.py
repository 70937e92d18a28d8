"""`orbax.checkpoint.handlers`: those of Orbax, which say of what kind an item is, and one's own.

What one of one's own writes into a scratch folder is an item of files, and it reads them in such a
folder again. In a job every process's handler is called, each with a folder of its own, and what
they write together is the item: where Orbax has one folder for all, no two processes may write one
name here.
"""

from __future__ import annotations

import asyncio
import contextvars
import pathlib
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import holdfast.compat.orbax.args as args_lib
from holdfast.checkpoint import Files
from holdfast.multihost import is_primary_host

from .args import CheckpointArgs
from .refusals import not_covered

T = TypeVar("T")
A = TypeVar("A")


def to_path(directory: Any) -> Any:
    """Returns an etils path where etils is installed, as Orbax does, else a pathlib one."""
    try:
        from etils import epath  # type: ignore[import-untyped]
    except ImportError:
        return pathlib.Path(directory)
    return epath.Path(directory)


def run_to_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine and returns what it returns. Blocks."""
    # On a thread of its own, since the caller may be inside of an event loop.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.copy_context().run, asyncio.run, coroutine).result()


# --- v0


class CheckpointHandler:
    """The base of handlers of one's own.

    `save(directory, args=...)` writes files, `restore(directory, args=...)` reads them.
    """

    def metadata(self, directory: Any) -> Any:
        """Returns None; nobody asks."""
        return None

    def finalize(self, directory: Any) -> None:
        """Ends the work of `save`, on the primary."""

    def close(self) -> None:
        """Does nothing."""

    @classmethod
    def typestr(cls) -> str:
        """Returns the name of the class."""
        return f"{cls.__module__}.{cls.__qualname__}"


class AsyncCheckpointHandler(CheckpointHandler):
    """The base of handlers whose `async_save(directory, args=...)` returns futures.

    A save waits for them before it returns.
    """


@dataclass
class CallArgs(CheckpointArgs):
    """The arguments of a handler that has no classes for them."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def _call(method: Callable[..., Any], folder: pathlib.Path, given: Any) -> Any:
    """Calls a method of a handler as its arguments say."""
    directory = to_path(folder)
    if isinstance(given, CallArgs):
        return method(directory, *given.args, **given.kwargs)
    return method(directory, args=given)


_handlers: dict[str, dict[type, type]] = {"save": {}, "restore": {}}


def register_with_handler(
    handler_cls: type, for_save: bool = False, for_restore: bool = False
) -> Callable[[type], type]:
    """Returns a decorator of a class of arguments, by which items are `handler_cls`'s."""
    if not (for_save or for_restore):
        raise ValueError("register_with_handler: expected for_save=True, for_restore=True, or both")

    def register(cls: type) -> type:
        if not issubclass(cls, CheckpointArgs):
            raise TypeError(f"{cls} must subclass `CheckpointArgs` in order to be registered.")
        for verb, wanted in (("save", for_save), ("restore", for_restore)):
            if wanted:
                _handlers[verb][cls] = handler_cls
        return cls

    return register


def get_registered_handler_cls(arg: Any) -> type:
    """Returns the handler that a class of arguments, or one of them, is registered with.

    Raises ValueError.
    """
    cls = arg if isinstance(arg, type) else type(arg)
    handler_cls = _handler_cls(cls)
    if handler_cls is None:
        raise ValueError(
            f"Unable to find registered `CheckpointHandler` for {cls}. Use `register_with_handler`."
        )
    return handler_cls


def _handler_cls(args_cls: type) -> type | None:
    return _handlers["save"].get(args_cls) or _handlers["restore"].get(args_cls)


def get_registered_args_cls(handler: Any) -> tuple[type, type]:
    """Returns the classes of arguments that a handler was registered with: to save and to restore.

    Raises ValueError.
    """
    to_save = _args_class(handler, "save")
    to_restore = _args_class(handler, "restore")
    if to_save is None or to_restore is None:
        raise ValueError(f"Unable to find registered `CheckpointArgs` for {handler}.")
    return to_save, to_restore


def has_registered_args(handler: Any) -> bool:
    """Returns whether a handler was registered with arguments to save and to restore."""
    return None not in (_args_class(handler, "save"), _args_class(handler, "restore"))


def _args_class(handler: Any, verb: str) -> type | None:
    cls = handler if isinstance(handler, type) else type(handler)
    return next((args for args, each in _handlers[verb].items() if each is cls), None)


def is_own(handler: Any) -> bool:
    """Returns whether a handler writes by itself: those of this package hold no code for it."""
    return any(callable(getattr(handler, method, None)) for method in ("save", "async_save"))


def own_handler(handler: Any, args: Any) -> Any:
    """Returns the handler of one's own for an item, None where it has none.

    It is the one given for the item, or one of the class that its arguments were registered with.
    """
    if is_own(handler):
        return handler
    cls = _handler_cls(type(args))
    return None if cls is None else cls()


def make_args(handler: Any, verb: str, *args: Any, **kwargs: Any) -> CheckpointArgs:
    """Returns the arguments of a handler of one's own."""
    cls = _args_class(handler, verb)
    return CallArgs(args, kwargs) if cls is None else cls(*args, **kwargs)


def files_to_save(handler: Any, args: Any) -> Files:
    """Returns the item that a handler of one's own saves."""

    def write(folder: pathlib.Path) -> None:
        if callable(getattr(handler, "async_save", None)):
            for future in run_to_end(_call(handler.async_save, folder, args)) or ():
                future.result()
        else:
            _call(handler.save, folder, args)
        if is_primary_host(0) and hasattr(handler, "finalize"):
            handler.finalize(to_path(folder))

    return Files(write, shared=True)


def files_to_restore(handler: Any, args: Any) -> Files:
    """Returns the `like` by which a handler of one's own restores.

    No arguments are those of their class without any.
    """
    given = make_args(handler, "restore") if args is None else args
    return Files(read=lambda folder: _call(handler.restore, folder, given))


# --- v0's that say of what kind an item is


class Handler(CheckpointHandler):
    """Names the arguments by which an item is saved and restored.

    Options on how bytes lie in files have no effect.
    """

    save_args: ClassVar[type] = args_lib.StandardSave
    restore_args: ClassVar[type] = args_lib.StandardRestore

    def __init__(self, *args: Any, **options: Any) -> None:
        pass


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
        if handler_registry is not None:
            raise not_covered(
                "CompositeCheckpointHandler(handler_registry=...)",
                "name items and their arguments in args.Composite",
            )
        for name, handler in items.items():
            check_handler("CompositeCheckpointHandler", handler, name)
        self.handlers = items


def check_handler(call: str, handler: Any, name: str = "") -> None:
    """Raises for what is no handler: neither of those above nor one that saves by itself."""
    if handler is not None and not isinstance(handler, Handler) and not is_own(handler):
        item = f" for the item {name!r}" if name else ""
        nearest = "give it the methods save(directory, args=...) and restore(directory, args=...)"
        raise not_covered(f"{call} with the handler {type(handler).__name__}{item}", nearest)


# --- v1


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


_registered: list[tuple[str | None, Any]] = []


def register_handler(
    cls: Any, *, checkpointable_name: str | None = None, secondary_typestrs: Any = None
) -> Any:
    """Registers a class of v1's handlers, for one item or (None) for all.

    Of several that can handle a value the last one does.
    """
    _registered.append((checkpointable_name, cls))
    return cls


def _find(name: str, can: Callable[[Any], Any]) -> Any:
    handlers = (cls() for chosen, cls in reversed(_registered) if chosen in (None, name))
    return next((handler for handler in handlers if can(handler)), None)


def checkpointable_to_save(name: str, value: Any) -> Any:
    """Returns a value for `save(items=...)`: files, where it or a handler writes them.

    Else the value itself.
    """
    handler = _find(name, lambda handler: handler.is_handleable(value))
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


def checkpointable_to_load(name: str, target: Any) -> Files | None:
    """Returns the `like` by which an item of files is loaded, None where nobody knows how.

    Without a target it is the handler that was registered for that item, or the only one that is
    registered for all.
    """
    if target is None:
        by_item = [cls for chosen, cls in _registered if chosen == name]
        for_all = [cls for chosen, cls in _registered if chosen is None]
        classes = set(by_item or for_all)
        handler = classes.pop()() if len(classes) == 1 else None
    else:
        handler = _find(name, lambda handler: handler.is_abstract_handleable(target))
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
