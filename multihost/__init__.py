"""The processes of one job as one: ids, barriers, preemption, collectives."""

from ._errors import Fatal, Hang, JobError, Preempted, StartupFailed, StartupTimeout, WorkerFailed

__all__ = ["Fatal", "Hang", "JobError", "Preempted", "StartupFailed", "StartupTimeout", "WorkerFailed"]
