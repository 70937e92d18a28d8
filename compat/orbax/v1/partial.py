"""`orbax.checkpoint.v1.partial`: a checkpoint whose tree is saved in parts.

Each part is durable when its save has ended, and in no listing. `finalize` makes one checkpoint of
them. Parts belong to the processes that saved them: what a job leaves that dies is deleted by the
next one that begins here.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from holdfast.checkpoint import CheckpointError, SaveHandle, StepNotFound
from holdfast.checkpoint import save_async as native_save_async
from holdfast.checkpoint.format.tree import describe
from holdfast.checkpoint.layouts.detect import layout_of
from holdfast.checkpoint.storage.base import NameTaken
from holdfast.checkpoint.storage.path import StorePath, absolute
from holdfast.checkpoint.tools.merge import merge_checkpoints
from holdfast.multihost import is_primary_host, sync_global_processes

from ..handling.items import orbax_errors
from ..metadata import with_text_keys
from ..refusals import not_covered
from .checkpoints import STATE, to_items
from .options import current
from .results import AsyncResponse

SUFFIX = ".partial_save"


class PartialSaveReplacementError(ValueError):
    """A part has a leaf that another part of the checkpoint has."""


@dataclass
class _Part:
    """A part whose save was begun."""

    paths: set[str]
    metadata: dict[str, Any]
    handle: SaveHandle


@dataclass
class _Session:
    """The parts of one checkpoint by their folders: all but the last are durable."""

    folder: str
    parts: dict[str, _Part] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def _new_paths(self, state: Any) -> set[str]:
        """Returns the paths of the next part.

        Raises PartialSaveReplacementError, and ValueError for what is no dict.
        """
        if not isinstance(state, dict):
            raise ValueError(
                f"partial.save: expected a dict, which others can be added to, found a"
                f" {type(state).__name__}"
            )
        paths = set(describe(state)[1])
        for path in sorted(paths):
            if self._meets(path):
                raise PartialSaveReplacementError(
                    f"the leaf {path!r} is in an earlier part of this save; expected each leaf once"
                )
        return paths

    def _meets(self, path: str) -> bool:
        """Says whether a leaf, or one above or below it, is in another part."""
        return any(
            f"{path}.".startswith(f"{other}.") or other.startswith(f"{path}.")
            for part in self.parts.values()
            for other in part.paths
        )

    def begin(self, state: Any, metadata: Any) -> None:
        """Begins to save a part, when the one before it is durable."""
        self.wait()
        paths = self._new_paths(state)
        folder = f"{self.folder}/{next(self.numbers):05d}.part"
        with orbax_errors():
            handle = native_save_async(
                folder, items=to_items({STATE: state}), timeout_s=current().timeout_s
            )
        self.parts[folder] = _Part(paths, with_text_keys(metadata or {}), handle)

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks until the last part is durable; raises its error, once: the part is not there, and
        others may be saved.
        """
        for folder, part in [*self.parts.items()][-1:]:
            try:
                with orbax_errors():
                    part.handle.wait(timeout_s)
            except BaseException:
                if part.handle.done():
                    self.parts.pop(folder, None)
                raise


_sessions: dict[str, _Session] = {}


def save(path: Any, state: Any, *, custom_metadata: Any = None) -> None:
    """Saves a part of a checkpoint's tree: a dict. Blocks until it is durable.

    Raises as `save_async`.
    """
    save_async(path, state, custom_metadata=custom_metadata).result()


def save_async(path: Any, state: Any, *, custom_metadata: Any = None) -> AsyncResponse[None]:
    """Begins to save a part of a checkpoint's tree; waits for the part before it.

    Every process of a job calls it. Raises FileExistsError where a checkpoint is there already,
    PartialSaveReplacementError (a ValueError) for a leaf that is in another part.
    """
    final = _final(path)
    _refuse_existing(final)
    session = _sessions.get(final) or _begin(final)
    session.begin(state, custom_metadata)
    return AsyncResponse(session.wait, None)


def finalize(path: Any) -> None:
    """Makes one checkpoint of the parts that were saved. Every process of a job calls it; blocks.

    Raises FileNotFoundError where none were saved, by this job, FileExistsError where a checkpoint
    is there already.
    """
    final = _final(path)
    _refuse_existing(final)
    session = _sessions.get(final)
    if session is None:
        raise FileNotFoundError(
            f"Partial save path {final}{SUFFIX} does not exist: partial.save was not called for"
            f" {final} by this job"
        )
    session.wait()
    try:
        if is_primary_host(0):
            _merge(session, final)
    finally:
        sync_global_processes("holdfast.compat.orbax.v1.partial.finalize")
    if layout_of(StorePath.of(final)) is None:
        raise CheckpointError(f"the primary could not finalize {final}", path=final)
    del _sessions[final]


def _merge(session: _Session, final: str) -> None:
    try:
        metadata: dict[str, Any] = {}
        for part in session.parts.values():
            metadata |= part.metadata
        merge_checkpoints([*session.parts], StorePath.of(final), STATE, metadata or None)
    except NameTaken as error:
        raise FileExistsError(f"{final}: a finished checkpoint is there already") from error
    _delete(session.folder)


def _final(path: Any) -> str:
    text: str = os.fspath(path)
    if "://" in text:
        raise not_covered(
            f"partial.save({text!r})", "save all parts as one tree: an object store has no links"
        )
    return absolute(text).removesuffix(SUFFIX)


def _refuse_existing(final: str) -> None:
    try:
        there = layout_of(StorePath.of(final)) is not None
    except StepNotFound:
        there = False
    if there:
        raise FileExistsError(f"{final}: a finished checkpoint is there already")


def _begin(final: str) -> _Session:
    """Begins a session: parts that a job left are deleted."""
    session = _Session(f"{final}{SUFFIX}")
    if is_primary_host(0):
        _delete(session.folder)
    sync_global_processes("holdfast.compat.orbax.v1.partial.begin")
    _sessions[final] = session
    return session


def _delete(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
