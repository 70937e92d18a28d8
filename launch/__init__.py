"""Starts and restarts the processes of a job: this machine, Ray, Slurm."""

from holdfast.multihost import (
    Fatal,
    Hang,
    JobError,
    Preempted,
    StartupFailed,
    StartupTimeout,
    WorkerFailed,
)

from .engines.local import MetricsSettings, RunSettings, run_local
from .engines.ray import engine as ray
from .engines.slurm import SlurmSettings, run_slurm
from .external.kubernetes import KubernetesJob
from .external.kubernetes import render as render_kubernetes
from .external.task import TaskSettings, run_task
from .supervisor.engine import JobResult
from .supervisor.job import DO_NOT_RESTART, DONE, HANG, PREEMPTED, RestartPolicy
from .view import LiveView
from .workers.standby import StandbySettings

__all__ = [
    "DONE",
    "DO_NOT_RESTART",
    "HANG",
    "PREEMPTED",
    "Fatal",
    "Hang",
    "JobError",
    "JobResult",
    "KubernetesJob",
    "LiveView",
    "MetricsSettings",
    "Preempted",
    "RestartPolicy",
    "RunSettings",
    "SlurmSettings",
    "StandbySettings",
    "StartupFailed",
    "StartupTimeout",
    "TaskSettings",
    "WorkerFailed",
    "ray",
    "render_kubernetes",
    "run_local",
    "run_slurm",
    "run_task",
]
