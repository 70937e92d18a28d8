"""Writes snapshots as packs, side by side, and JSON items."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._record import ItemReport
from ._snapshot import Snapshot
from ._storage import Storage


def write_snapshot(
    snapshot: Snapshot, storage: Storage, step_dir: str, item: str, writer_id: str, *, progress: Callable[[int], None] | None = None
) -> ItemReport:
    """Writes the packs of this process under `<step_dir>/<item>/`, durably, and reports them; blocks, and empties the snapshot.

    `step_dir` is relative to the store's root ("" for the root itself). `progress` hears, from several threads, how many more bytes went out.
    A failure is the store's OSError (or the device's error); the caller turns it into SaveFailed and reports it to the group.
    """
    raise NotImplementedError


def write_json(storage: Storage, step_dir: str, item: str, writer_id: str, process: int, value: Any) -> ItemReport:
    """Writes a value of JSON types as `<item>/<process>-j-<writer id>.json`, durably, and reports it."""
    raise NotImplementedError
