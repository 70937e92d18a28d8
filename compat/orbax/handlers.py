"""`orbax.checkpoint.handlers`: those that say of what kind an item is, which hold no code that
writes, and one's own, of v0 and v1.

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
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from holdfast.checkpoint import Files
from holdfast.multihost import is_primary_host

from . import args as args_lib
from .args import CheckpointArgs
from .refusals import not_covered

T = TypeVar("T")


def to_path(directory: Any) -> Any:
    """Returns an etils path where etils is installed, as Orbax does, else a pathlib one."""
    try:
        from etils import epath  # type: ignore[import-untyped]
    except ImportError:
        return pathlib.Path(directory)
    return epath.Path(directory)


def run_to_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on a thread of its own, since the caller may be inside of an event loop;
    returns what it returns. Blocks.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.copy_context().run, asyncio.run, coroutine).result()


# --- v0


class CheckpointHandler:
    """The base of handlers of one's own: `save(directory, args=...)` writes files,
    `restore(directory, args=...)` reads them.
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
    """The base of handlers whose `async_save(directory, args=...)` returns futures; a save waits
    for them before it returns.
    """


@dataclass
class CallArgs(CheckpointArgs):
    """The arguments of a handler that has no classes for them."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


_handlers: dict[str, dict[type, type]] = {"save": {}, "restore": {}}


def register_with_handler(
    handler_cls: type, for_save: bool = False, for_restore: bool = False
) -> Callable[[type], type]:
    """Returns a decorator of a class of arguments: items that are saved or restored with them are
    `handler_cls`'s.
    """
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
    """Returns the handler that a class of arguments, or one of them, is registered with. Raises
    ValueError.
    """
    cls = arg if isinstance(arg, type) else type(arg)
    found = _handlers["save"].get(cls) or _handlers["restore"].get(cls)
    if found is None:
        raise ValueError(
            f"Unable to find registered `CheckpointHandler` for {cls}. Use `register_with_handler`."
        )
    return found


def get_registered_args_cls(handler: Any) -> tuple[type, type]:
    """Returns the classes of arguments that a handler was registered with: to save and to restore.
    Raises ValueError.
    """
    found = [_args_class(handler, verb) for verb in ("save", "restore")]
    if None in found:
        raise ValueError(f"Unable to find registered `CheckpointArgs` for {handler}.")
    return found[0], found[1]  # type: ignore[return-value]


def has_registered_args(handler: Any) -> bool:
    """Says whether a handler was registered with arguments to save and to restore."""
    return None not in [_args_class(handler, verb) for verb in ("save", "restore")]


def _args_class(handler: Any, verb: str) -> type | None:
    cls = handler if isinstance(handler, type) else type(handler)
    return next((args for args, each in _handlers[verb].items() if each is cls), None)


def is_own(handler: Any) -> bool:
    """Says whether a handler does the writing itself: those of this package hold no code for it."""
    return callable(getattr(handler, "save", None)) or callable(
        getattr(handler, "async_save", None)
    )


def own_handler(handler: Any, args: Any) -> Any:
    """Returns the handler of one's own for an item: the one given for it, or one of the class that
    its arguments were registered with.
    """
    if is_own(handler):
        return handler
    cls = _handlers["save"].get(type(args)) or _handlers["restore"].get(type(args))
    return cls() if cls is not None else None


def make_args(handler: Any, verb: str, *args: Any, **kwargs: Any) -> CheckpointArgs:
    """Returns the arguments of a handler of one's own."""
    cls = _args_class(handler, verb)
    return CallArgs(args, kwargs) if cls is None else cls(*args, **kwargs)


def files_to_save(handler: Any, args: Any) -> Files:
    """Returns the item that a handler of one's own saves."""

    def write(folder: pathlib.Path) -> None:
        directory = to_path(folder)
        given, named = (
            (args.args, args.kwargs) if isinstance(args, CallArgs) else ((), {"args": args})
        )
        if callable(getattr(handler, "async_save", None)):
            for future in run_to_end(handler.async_save(directory, *given, **named)) or ():
                future.result()
        else:
            handler.save(directory, *given, **named)
        if is_primary_host(0):
            getattr(handler, "finalize", lambda directory: None)(directory)

    return Files(write, shared=True)


def files_to_restore(handler: Any, args: Any) -> Files:
    """Returns the `like` by which a handler of one's own restores; None is its arguments'
    defaults.
    """
    chosen = make_args(handler, "restore") if args is None else args
    given, named = (
        (chosen.args, chosen.kwargs) if isinstance(chosen, CallArgs) else ((), {"args": chosen})
    )
    return Files(read=lambda folder: handler.restore(to_path(folder), *given, **named))


# --- v0's that say of what kind an item is


class Handler(CheckpointHandler):
    """Says with which arguments an item is saved and restored. Options on how bytes lie in files
    have no effect.
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
    """A value that writes its own files, and reads them back into itself. What either returns is
    awaited.
    """

    async def save(self, directory: Any) -> Awaitable[None] | None:
        """Writes files."""
        ...

    async def load(self, directory: Any) -> Awaitable[None] | None:
        """Reads the files that `save` wrote."""
        ...


class CheckpointableHandler:
    """The base of v1's handlers: `save(directory, value)`, `load(directory, abstract)`,
    `is_handleable`, `is_abstract_handleable`.
    """


_registered: list[tuple[str | None, Any]] = []


def register_handler(
    cls: Any, *, checkpointable_name: str | None = None, secondary_typestrs: Any = None
) -> Any:
    """Registers a class of v1's handlers, for one item or (None) for all; of several that can, the
    last one handles a value.
    """
    _registered.append((checkpointable_name, cls))
    return cls


def _find(name: str, can: Callable[[Any], Any]) -> Any:
    handlers = (cls() for chosen, cls in reversed(_registered) if chosen in (None, name))
    return next((handler for handler in handlers if can(handler)), None)


def checkpointable_to_save(name: str, value: Any) -> Any:
    """Returns a value for `save(items=...)`: files, where it writes them itself or a registered
    handler does, else the value.
    """
    handler = _find(name, lambda handler: handler.is_handleable(value))
    if handler is None and not isinstance(value, StatefulCheckpointable):
        return value

    async def write(directory: PathAwaitingCreation) -> None:
        rest = await (value.save(directory) if handler is None else handler.save(directory, value))
        if rest is not None:
            await rest

    return Files(
        lambda folder: run_to_end(write(PathAwaitingCreation(to_path(folder)))), shared=True
    )


def checkpointable_to_load(name: str, target: Any) -> Files | None:
    """Returns the `like` by which an item of files is loaded as `target` says, None where nobody
    knows how.

    Without a target it is the handler that was registered for that item, or the only one that is
    registered for all.
    """
    if target is None:
        named = [cls for chosen, cls in _registered if chosen == name] or [
            cls for chosen, cls in _registered if chosen is None
        ]
        handler = named[0]() if len(set(named)) == 1 else None
    else:
        handler = _find(name, lambda handler: handler.is_abstract_handleable(target))
    if handler is None and not isinstance(target, StatefulCheckpointable):
        return None

    async def read(directory: Any) -> Any:
        rest = await (
            target.load(directory) if handler is None else handler.load(directory, target)
        )
        value = await rest if rest is not None else None
        return target if handler is None else value

    return Files(read=lambda folder: run_to_end(read(to_path(folder))))
