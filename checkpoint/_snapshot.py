"""Takes what a process owns of a tree off the caller's hands."""

from __future__ import annotations

from typing import Any

from ._plan import Plan


class Snapshot:
    """Holds this process's share of a tree until it is written."""

    plan: Plan

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until the caller may donate or overwrite its arrays; at once unless the host memory bound was below the bytes owned.

        `write_snapshot` must be running meanwhile: it frees the memory that the rest needs.
        """
        raise NotImplementedError

    def release(self) -> None:
        """Drops whatever is still held; for a snapshot that will not be written. May be called twice."""
        raise NotImplementedError


def take_snapshot(plan: Plan, tree: Any, *, host_memory_bytes: int | None = None) -> Snapshot:
    """Starts copying this process's chunks of `tree` to the host and returns; on CPU they are views, numpy leaves are copied.

    `tree` must be the one that `plan` was made of, or one with equal avals and shardings.
    """
    raise NotImplementedError
