"""Errors of a whole job: what a launcher decides by (see launch for what is retried)."""

from __future__ import annotations

from holdfast.coordination import HoldfastError


class JobError(HoldfastError):
    """Says what ended an attempt of the job. `knob` names the setting that governs it."""

    attempt: int | None = None
    processes: tuple[int, ...] = ()
    elapsed_s: float | None = None
    timeout_s: float | None = None
    knob: str = ""


class StartupTimeout(JobError):
    """Says that the processes or their machines were not all there in time. Retryable: capacity may come."""


class StartupFailed(JobError):
    """Says that starting failed for another reason than time. Retryable, a bounded number of times."""


class Preempted(JobError):
    """Says that the job was told to give its machines back. Has a budget of its own."""


class WorkerFailed(JobError):
    """Says that a process died or raised. Has a budget of its own."""


class Hang(JobError):
    """Says that a process made no progress for `timeout_s` seconds. Retryable, with a stack dump."""


class Fatal(JobError):
    """Says that starting again cannot help. Never retried."""
