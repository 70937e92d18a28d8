"""Handlers of one's own, which write files.

What one of one's own writes into a scratch folder is an item of files, and it reads them in such a
folder again. In a job every process's handler is called, each with a folder of its own, and what
they write together is the item: where Orbax has one folder for all, no two processes may write one
name here.
"""

from __future__ import annotations

import asyncio
import contextvars
import pathlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from holdfast.checkpoint import Files
from holdfast.multihost import is_primary_host

from .args import (
    CheckpointArgs,
    CheckpointHandler,
    StandardRestore,
    StandardSave,
    handler_of_args,
    registered_args_of,
)

T = TypeVar("T")
_USUAL = {"save": StandardSave, "restore": StandardRestore}


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


class AsyncCheckpointHandler(CheckpointHandler):
    """The base of handlers whose `async_save(directory, args=...)` returns futures.

    A save waits for them before it returns.
    """


@dataclass
class CallArgs(CheckpointArgs):
    """The arguments of a handler that has no classes for them."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


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
    cls = handler_of_args(type(args))
    return None if cls is None else cls()


def arguments(handler: Any, verb: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the arguments of a call: `args=...`, one of them by position, or what makes them."""
    given = kwargs.get("args")
    if given is None and args and isinstance(args[0], CheckpointArgs):
        given = args[0]
    if given is not None:
        return given
    rest = {name: value for name, value in kwargs.items() if name != "args"}
    if not is_own(handler):
        return getattr(handler, f"{verb}_args", _USUAL[verb])(*args, **rest)
    cls = registered_args_of(handler, verb)
    return CallArgs(tuple(args), rest) if cls is None else cls(*args, **rest)


def _call(method: Callable[..., Any], folder: pathlib.Path, given: Any) -> Any:
    """Calls a method of a handler as its arguments say."""
    directory = to_path(folder)
    if isinstance(given, CallArgs):
        return method(directory, *given.args, **given.kwargs)
    return method(directory, args=given)


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
    if args is None:
        args = (registered_args_of(handler, "restore") or CallArgs)()
    return _call(handler.restore, folder, args)


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
