"""What Orbax keeps in a root beside the steps: its metadata, and the folder of deleted steps."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.checkpoint.format.step_folders import (
    PLAIN_NAMES,
    parse_step_format,
    read_step_names,
    step_folders,
)
from holdfast.checkpoint.layouts.detect import find_steps
from holdfast.checkpoint.storage.path import open_storage

from ..metadata import RootMetadata

_log = logging.getLogger(__name__)
METADATA = "metadata/_ROOT_METADATA"
METADATA_ONCE = "metadata/metadata"  # as Orbax called it once
_METADATA_BYTES = 1 << 24


def write_root_metadata(
    directory: str | os.PathLike[str], metadata: Mapping[str, Any] | None
) -> None:
    """Writes the metadata of a root, where it has none and some is given. Blocks; for the
    primary.
    """
    if metadata is None or read_root_metadata(directory) is not None:
        return
    about = {"internal_metadata": {}, "custom_metadata": dict(metadata)}
    data = json.dumps(about).encode()
    open_storage(directory).write(METADATA, len(data), [(0, [memoryview(data)])])


def read_root_metadata(directory: str | os.PathLike[str]) -> RootMetadata | None:
    """Returns the metadata of a root, whose writer is Orbax or not; None where it has none."""
    storage = open_storage(directory)
    for name in (METADATA, METADATA_ONCE):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return _parse(storage.fetch(name, _METADATA_BYTES))
    return None


def _parse(data: bytes) -> RootMetadata:
    about = json.loads(data)
    internal = about.pop("internal_metadata", None) or {}
    custom = about.pop("custom_metadata", None) or {}
    return RootMetadata(internal, custom | about)  # what is neither is the user's


def called_otherwise(directory: str | os.PathLike[str], step_format: str) -> str | None:
    """Returns what a root that calls its steps otherwise calls its step 7, None for others."""
    storage = open_storage(directory)
    names = read_step_names(storage)
    settled = names != PLAIN_NAMES or step_folders(storage, names)
    if names == parse_step_format(step_format) or not settled:
        return None
    return names.name_of(7)


class Trash:
    """The folder of a root where steps lie that were let go; other libraries delete them there."""

    def __init__(self, directory: str | os.PathLike[str], name: str | None) -> None:
        self._root = None
        if name is not None and "://" not in os.fspath(directory):
            self._root = Path(directory)
            self._trash = self._root / name

    def put_aside(self, step: int) -> bool:
        """Links the files of a step of holdfast's into the folder; returns False where that fails.

        The step is then deleted, and its files are there by their other names.
        """
        if self._root is None:
            return True
        found = find_steps(open_storage(self._root)).get(step)
        if found is None or found[1].name != "holdfast":  # others are not deleted
            return True
        target = self._trash / found[0]
        try:
            if target.exists():
                shutil.rmtree(target)
            shutil.copytree(self._root / found[0], target, copy_function=os.link)
        except OSError as error:
            _log.warning("step %d stays: it could not be put into %s: %s", step, target, error)
            return False
        return True
