"""`orbax.checkpoint.handlers`: handlers of one's own.

What one of one's own writes into a scratch folder is an item of files, and it reads them in such a
folder again. In a job every process's handler is called, each with a folder of its own, and what
they write together is the item: where Orbax has one folder for all, no two processes may write one
name here.
"""

from __future__ import annotations

import asyncio
import contextvars
import pathlib
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from holdfast.checkpoint import Files
from holdfast.multihost import is_primary_host

from .args import CheckpointArgs

T = TypeVar("T")


def to_path(directory: Any) -> Any:
    """Returns an etils path where etils is installed, as Orbax does, else a pathlib one."""
    try:
        from etils import epath  # type: ignore[import-untyped]
    except ImportError:
        return pathlib.Path(directory)
    return epath.Path(directory)


def run_to_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine and returns what it returns. Blocks."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return contextvars.copy_context().run(asyncio.run, coroutine)
    # The caller is inside of an event loop, and a thread has one at a time.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.copy_context().run, asyncio.run, coroutine).result()


class CheckpointHandler:
    """The base of handlers of one's own.

    `save(directory, args=...)` writes files, `restore(directory, args=...)` reads them.
    """

    has_item: ClassVar[bool] = False  # whether it hands on an item, and writes no files

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
            raise TypeError(
                f"register_with_handler: expected a class below CheckpointArgs, found {cls}"
            )
        for verb, wanted in (("save", for_save), ("restore", for_restore)):
            if wanted:
                _handlers[verb][cls] = handler_cls
        return cls

    return register


def get_registered_handler_cls(arg: Any) -> type:
    """Returns the handler that a class of arguments, or one of them, is registered with.

    Raises TypeError for what is no class of arguments, ValueError where there is none.
    """
    cls = arg if isinstance(arg, type) else type(arg)
    if not issubclass(cls, CheckpointArgs):
        raise TypeError(f"expected a class below CheckpointArgs, found {cls}")
    handler_cls = _handler_cls(cls)
    if handler_cls is None:
        raise ValueError(
            f"no handler is registered for {cls}; decorate it with register_with_handler"
        )
    return handler_cls


def _handler_cls(args_cls: type) -> type | None:
    return _handlers["save"].get(args_cls) or _handlers["restore"].get(args_cls)


def registered_args() -> set[type]:
    """Returns the classes of arguments that were registered with handlers."""
    return {*_handlers["save"], *_handlers["restore"]}


def get_registered_args_cls(handler: Any) -> tuple[type, type]:
    """Returns the classes of arguments that a handler was registered with: to save and to restore.

    Raises ValueError.
    """
    to_save = _args_class(handler, "save")
    to_restore = _args_class(handler, "restore")
    if to_save is None or to_restore is None:
        raise ValueError(f"no arguments are registered for {handler}")
    return to_save, to_restore


def has_registered_args(handler: Any) -> bool:
    """Returns whether a handler was registered with arguments to save and to restore."""
    return None not in (_args_class(handler, "save"), _args_class(handler, "restore"))


def _args_class(handler: Any, verb: str) -> type | None:
    cls = handler if isinstance(handler, type) else type(handler)
    return next((args for args, each in _handlers[verb].items() if each is cls), None)


def is_own(handler: Any) -> bool:
    """Returns whether a handler writes files by itself, which those of this package do not."""
    methods = ("save", "async_save")
    writes = any(callable(getattr(handler, method, None)) for method in methods)
    return writes and not getattr(handler, "has_item", False)


def handler_for(handler: Any, args: Any) -> Any:
    """Returns the handler of an item, None where its arguments say enough.

    It is the one given for the item, or one of the class that its arguments were registered with.
    """
    if handler is not None:
        return handler
    cls = _handler_cls(type(args))
    return None if cls is None else cls()


def make_args(handler: Any, verb: str, *args: Any, **kwargs: Any) -> CheckpointArgs:
    """Returns the arguments of a handler of one's own."""
    cls = _args_class(handler, verb)
    return CallArgs(args, kwargs) if cls is None else cls(*args, **kwargs)


def call_save(handler: Any, folder: pathlib.Path, args: Any, *, background: bool) -> None:
    """Calls the handler's `async_save` and waits for what it returns, or `save`."""
    if background:
        for future in run_to_end(_call(handler.async_save, folder, args)) or ():
            future.result()
    else:
        _call(handler.save, folder, args)


def call_restore(handler: Any, folder: pathlib.Path, args: Any) -> Any:
    """Calls the handler's method that restores.

    No arguments are those of their class without any.
    """
    return _call(handler.restore, folder, make_args(handler, "restore") if args is None else args)


def files_to_save(handler: Any, args: Any) -> Files:
    """Returns the item that a handler of one's own saves."""

    def write(folder: pathlib.Path) -> None:
        background = callable(getattr(handler, "async_save", None))
        call_save(handler, folder, args, background=background)
        if is_primary_host(0) and hasattr(handler, "finalize"):
            handler.finalize(to_path(folder))

    return Files(write, shared=True)


def files_to_restore(handler: Any, args: Any) -> Files:
    """Returns the `like` by which a handler of one's own restores."""
    return Files(read=lambda folder: call_restore(handler, folder, args))
