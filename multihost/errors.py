"""Errors of a whole job: what a launcher decides by (see launch for what is retried)."""

from __future__ import annotations

from typing import ClassVar

from holdfast.coordination import HoldfastError

from .spec import ProcessSpec


class JobError(HoldfastError):
    """What ended an attempt of the job. `knob` names the setting that governs it.

    A program of a job that ends by one ends with `exit_code`.
    """

    exit_code: ClassVar[int] = 1
    attempt: int | None = None
    processes: tuple[int, ...] = ()
    elapsed_s: float | None = None
    timeout_s: float | None = None
    knob: str = ""


class StartupTimeout(JobError):
    """The processes or their machines were not all there in time. Retryable: capacity may come."""


class StartupFailed(JobError):
    """Starting failed for another reason than time. Retryable, a bounded number of times."""


class Preempted(JobError):
    """The job had to give its machines back. Has a budget of its own."""

    exit_code = 75
    _may_follow_death = False


class WorkerFailed(JobError):
    """A process died or raised. Has a budget of its own."""

    _may_follow_death = False


class Hang(JobError):
    """A process made no progress for `timeout_s` seconds. Retryable, with a stack dump."""

    exit_code = 124
    _may_follow_death = False


class Fatal(JobError):
    """Starting again cannot help. Never retried."""

    exit_code = 93
    _may_follow_death = False


def failed_start(spec: ProcessSpec, why: str) -> StartupFailed:
    """Returns the error of a process that cannot start as what `spec` says."""
    return StartupFailed(why, attempt=spec.attempt, processes=(spec.process_id,))
