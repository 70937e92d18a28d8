"""Brings items back, onto any topology."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ._record import Record
from ._storage import Storage


class _Saved:
    def __repr__(self) -> str:
        return "SAVED"


SAVED: Final = _Saved()  # a `like`: the saved shardings, on this job's devices


@dataclass(frozen=True)
class Report:
    """What `verify` has found: every file was read whole and was as written."""

    path: str
    step: int
    files: int
    leaves: int
    bytes: int


def read_record(storage: Storage, step_dir: str) -> Record:
    """Reads `<step_dir>/checkpoint.json`; raises StepNotFound where there is none, Corrupt or HostileCheckpoint where it is damaged."""
    raise NotImplementedError


def restore_item(
    storage: Storage,
    step_dir: str,
    record: Record,
    item: str = "state",
    like: Any = None,
    *,
    partial: bool | Callable[[str], bool] = False,
    cast: bool = False,
    types: Sequence[type] = (),
    read_once: bool = False,
    host_memory_bytes: int | None = None,
) -> Any:
    """Restores one tree item (a JSON item comes back as rank 0's value; see `read_json`).

    `like` is a tree of arrays, jax.ShapeDtypeStructs or values, None (numpy everywhere) or SAVED. `partial=True` ignores saved leaves that `like`
    lacks; a predicate on leaf paths says which leaves to read, and without a `like` the others come back as None, with one as they are in
    it. `cast=True` allows another dtype. Blocks; raises StepNotFound (no such item), TreeMismatch, Corrupt, HostileCheckpoint, StepGone.
    """
    raise NotImplementedError


def read_json(storage: Storage, step_dir: str, record: Record, item: str, process: int = 0) -> Any:
    """Returns the value that a process wrote for a JSON item; StepNotFound when that item or process has none."""
    raise NotImplementedError


def verify_step(storage: Storage, step_dir: str, record: Record) -> Report:
    """Reads every byte of every file that the record names and checks it; raises Corrupt, HostileCheckpoint or StepGone."""
    raise NotImplementedError
