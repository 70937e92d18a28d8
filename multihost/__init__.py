"""The processes of one job as one: ids, barriers, preemption, collectives."""

from ._errors import Fatal, Hang, JobError, Preempted, StartupFailed, StartupTimeout, WorkerFailed
from ._group import ClusterGroup, Group, Solo, default_group

__all__ = [
    "ClusterGroup",
    "Fatal",
    "Group",
    "Hang",
    "JobError",
    "Preempted",
    "Solo",
    "StartupFailed",
    "StartupTimeout",
    "WorkerFailed",
    "default_group",
]
