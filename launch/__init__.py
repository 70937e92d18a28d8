"""Starts and restarts the processes of a job: this machine, Ray, Slurm."""

from holdfast.multihost import Fatal, Hang, JobError, Preempted, StartupFailed, StartupTimeout, WorkerFailed

from . import _ray as ray
from ._engine import Engine, JobResult, supervise
from ._job import DO_NOT_RESTART, DONE, HANG, PREEMPTED, RestartPolicy
from ._kubernetes import KubernetesJob
from ._kubernetes import render as render_kubernetes
from ._local import run_local
from ._slurm import run_slurm
from ._task import run_task
from ._view import LiveView

__all__ = [
    "DONE",
    "DO_NOT_RESTART",
    "HANG",
    "PREEMPTED",
    "Engine",
    "Fatal",
    "Hang",
    "JobError",
    "JobResult",
    "KubernetesJob",
    "LiveView",
    "Preempted",
    "RestartPolicy",
    "StartupFailed",
    "StartupTimeout",
    "WorkerFailed",
    "ray",
    "render_kubernetes",
    "run_local",
    "run_slurm",
    "run_task",
    "supervise",
]
