"""How often this job has failed, as its launcher accounts for it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from holdfast.coordination import CoordinationError, StatusClient

from .runtime import current_spec


@dataclass(frozen=True)
class JobHistory:
    """How often a job was started again, and the seconds since its first start."""

    failures: int
    run_s: float


def job_history() -> JobHistory | None:
    """Returns what the coordinator knows of the job; None where it cannot be asked, or where no
    launcher of ours accounts for it. Blocks for one call.
    """
    spec = current_spec()
    if spec is None:
        return None
    with (
        suppress(CoordinationError),
        StatusClient(spec.coordinator, spec.new_credentials()) as client,
    ):
        status = client.status()
        run_s = sum(status.goodput_s.values())
        return JobHistory(max(0, status.attempt - 1), run_s) if run_s > 0 else None
    return None
