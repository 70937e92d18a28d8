"""The processes of one job as one: ids, barriers, preemption, collectives."""

from ._agreement import SyncPoint, agree_on_step
from ._errors import Fatal, Hang, JobError, Preempted, StartupFailed, StartupTimeout, WorkerFailed
from ._group import ClusterGroup, Group, Solo, default_group
from ._preemption import add_preemption_source, notify_preemption, preemption_notice, reached_preemption
from ._sources import GceMetadata, Notice, Polled, Signals, SlurmEnd, Source, WatchedFile
from ._spec import MEGASCALE_PORT, ProcessSpec, apply_changes, slice_changes

__all__ = [
    "MEGASCALE_PORT",
    "ClusterGroup",
    "Fatal",
    "GceMetadata",
    "Group",
    "Hang",
    "JobError",
    "Notice",
    "Polled",
    "Preempted",
    "ProcessSpec",
    "Signals",
    "SlurmEnd",
    "Solo",
    "Source",
    "StartupFailed",
    "StartupTimeout",
    "SyncPoint",
    "WatchedFile",
    "WorkerFailed",
    "add_preemption_source",
    "agree_on_step",
    "apply_changes",
    "default_group",
    "notify_preemption",
    "preemption_notice",
    "reached_preemption",
    "slice_changes",
]
