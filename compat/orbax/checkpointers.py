"""`orbax.checkpoint.checkpointers`: one checkpoint in one folder, without a manager."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Self

import holdfast.compat.orbax.args as args_lib
import holdfast.compat.orbax.handling.standard as standard
from holdfast.checkpoint import SaveHandle, save, save_async
from holdfast.checkpoint.layouts.detect import layout_of
from holdfast.checkpoint.storage.path import StorePath, absolute, open_storage
from holdfast.multihost import is_primary_host

from .handling.items import cancel, orbax_errors
from .metadata import StepMetadata, step_metadata
from .options import AsyncOptions
from .own_handlers import arguments
from .refusals import check_options

# The file by which programs, Flax among them, know a folder that a checkpointer wrote.
MARKER = "checkpoint"
# How files are made and processes take part: of no effect here.
OPTIONS = (
    "atomicity_options checkpoint_metadata_store file_options multiprocessing_options"
    " temporary_path_class"
)


class AbstractCheckpointer:
    """The base of checkpointers."""


class Checkpointer(AbstractCheckpointer):
    """Saves and restores one folder. `save` blocks until the checkpoint is durable."""

    def __init__(
        self,
        handler: Any,
        timeout_secs: int | None = None,
        *,
        async_options: AsyncOptions | None = None,
        **options: Any,
    ) -> None:
        check_options(type(self).__name__, options, OPTIONS)
        standard.check_handler(type(self).__name__, handler)
        self._handler = handler
        usual_s = (async_options or AsyncOptions()).timeout_secs
        self.timeout_s = float(usual_s if timeout_secs is None else timeout_secs)

    @property
    def handler(self) -> Any:
        """The handler."""
        return self._handler

    def save(
        self,
        directory: str | os.PathLike[str],
        *args: Any,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
        save_context: Any = None,
        **kwargs: Any,
    ) -> None:
        """Saves; `force` replaces what is there.

        Raises ValueError where a checkpoint is there already.
        """
        given = arguments(self._handler, "save", args, kwargs)
        call = f"{type(self).__name__}.save"
        with orbax_errors("force=True"):
            items, metadata = standard.items_to_save(call, self._handler, given, custom_metadata)
            self._save(directory, items, overwrite=force, metadata=metadata)

    def _save(
        self, directory: str | os.PathLike[str], items: Mapping[str, Any], **options: Any
    ) -> None:
        replaced = files_to_replace(directory, options["overwrite"])
        save(directory, items=items, timeout_s=self.timeout_s, **options)
        _mark(directory, replaced)

    def restore(self, directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Restores. Raises FileNotFoundError, ValueError."""
        return self._restore(directory, arguments(self._handler, "restore", args, kwargs))

    def _restore(self, directory: str | os.PathLike[str], given: Any) -> Any:
        call = f"{type(self).__name__}.restore"
        return standard.restore_folder(call, directory, self._handler, given)

    def metadata(self, directory: str | os.PathLike[str]) -> StepMetadata:
        """Returns what is known of the checkpoint without reading it."""
        with orbax_errors():
            saved, name = standard.find_folder(directory)
        return step_metadata(saved, standard.folder_metadata(saved, name, self._handler))

    def structure(self, directory: str | os.PathLike[str]) -> Any:
        """Returns the tree of an item with what is known of its leaves."""
        return self.metadata(directory).item_metadata.tree

    def close(self) -> None:
        """Does nothing: nothing is in flight."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def files_to_replace(directory: str | os.PathLike[str], overwrite: bool) -> list[str]:
    """Returns at the primary the files of a checkpoint of Orbax's that is overwritten, and their
    folders: once ours is committed they are deleted, because Orbax would go on to read them.
    """
    if not (overwrite and is_primary_host(0)):
        return []
    names = [
        each.name for each in open_storage(directory).list("", recursive=True, names_only=True)
    ]
    layout = layout_of(StorePath.of(directory)) if names else None
    if layout is None or layout.name != "orbax":
        return []
    folders = {f"{folder}/" for name in names for folder in PurePosixPath(name).parents[:-1]}
    return [*names, *sorted(folders, reverse=True)]


def _mark(directory: str | os.PathLike[str], replaced: Sequence[str]) -> None:
    """Marks a folder as a checkpointer's, once its checkpoint is there, and deletes what that has
    replaced.
    """
    if is_primary_host(0):
        storage = open_storage(directory)
        storage.delete(replaced)
        text = b"a checkpoint of holdfast's: its record is checkpoint.json\n"
        storage.write(MARKER, len(text), [(0, [memoryview(text)])])


class AsyncCheckpointer(Checkpointer):
    """A Checkpointer whose `save` returns when the arrays may be changed, and goes on writing.

    The next save, a restore and `close` wait for it. For one thread at a time.
    """

    _in_flight: SaveHandle | None = None

    def _save(
        self, directory: str | os.PathLike[str], items: Mapping[str, Any], **options: Any
    ) -> None:
        self.wait_until_finished()
        directory = absolute(directory)
        replaced = files_to_replace(directory, options["overwrite"])
        handle = save_async(directory, items=items, timeout_s=self.timeout_s, **options)
        # Not by `wait_until_finished`, which a program that ends may not call.
        handle.on_commit(lambda _: _mark(directory, replaced))
        self._in_flight = handle

    def _restore(self, directory: str | os.PathLike[str], given: Any) -> Any:
        self.wait_until_finished()
        return super()._restore(directory, given)

    def wait_until_finished(self) -> None:
        """Blocks until no save is in flight; raises the error of one that failed, once."""
        if self._in_flight is None:
            return
        handle = self._in_flight
        self._in_flight = None
        with orbax_errors():
            handle.wait()

    def cancel(self) -> None:
        """Calls the save in flight off; blocks until it has ended. One that commits goes on."""
        if self._in_flight is not None and cancel(self._in_flight):
            self._in_flight = None

    def check_for_errors(self) -> None:
        """Raises the error of a save that failed, once. Does not block."""
        if self._in_flight is not None and self._in_flight.done():
            self.wait_until_finished()

    def close(self) -> None:
        """Waits for the save in flight."""
        self.wait_until_finished()


class StandardCheckpointer(AsyncCheckpointer):
    """Saves and restores trees."""

    def __init__(self, *, async_options: AsyncOptions | None = None, **options: Any) -> None:
        own = {name: options.pop(name) for name in OPTIONS.split() if name in options}
        handler = standard.StandardCheckpointHandler(**options)
        super().__init__(handler, async_options=async_options, **own)

    def save(
        self, directory: str | os.PathLike[str], state: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """Saves a tree."""
        super().save(directory, state, *args, **kwargs)

    def restore(
        self,
        directory: str | os.PathLike[str],
        target: Any = None,
        *args: Any,
        strict: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Restores a tree like `target`; None: as it was saved, in dicts and lists."""
        given = kwargs.get("args", target)
        if not isinstance(given, args_lib.CheckpointArgs):
            given = args_lib.StandardRestore(target, strict=strict)
        return self._restore(directory, given)


class PyTreeCheckpointer(Checkpointer):
    """Saves and restores trees, with arguments for each leaf."""

    def __init__(
        self,
        primary_host: int | None = 0,
        use_ocdbt: bool = True,
        use_zarr3: bool = False,
        use_compression: bool = True,
    ) -> None:
        super().__init__(standard.PyTreeCheckpointHandler())
