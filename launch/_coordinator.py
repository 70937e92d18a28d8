"""The coordinator of one attempt, and the progress that it hears of, as events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ._job import Event


class Coordinator(Protocol):
    """Is what an engine needs of a coordinator that it started."""

    @property
    def address(self) -> str: ...
    def close(self) -> None: ...


def start_coordinator(job_id: str, attempt: int, count: int, tell: Callable[[Event], None]) -> Coordinator:
    """Starts a coordinator of its own for (job, attempt) on a fresh port; `tell` gets Progress as it is reported."""
    from holdfast.coordination import CoordinationService

    return CoordinationService.spawn(count, job_id=job_id, attempt=attempt, recoverable=True, survivable=True)
