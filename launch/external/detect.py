"""Who a process is, as its launcher says: Slurm, Open MPI and PMIx, Kubernetes. Pure.

Sources: srun(1) and sbatch(1), "output environment variables"; mpirun(1) of Open MPI 4 and 5;
Kubernetes, "Indexed Job"; JobSet, "labels and annotations". `holdfast task` turns what is found
into a ProcessSpec.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_ATTEMPTS_PER_REQUEUE = 10_000


@dataclass(frozen=True)
class ClusterEnv:
    """What a launcher tells a process about itself."""

    launcher: str
    job_id: str
    attempt: int
    process_id: int
    num_processes: int
    first_host: str = ""  # where rank 0 runs; "": unknown
    local_rank: int | None = None  # among the processes of this node
    local_size: int = 0  # their number; 0: unknown
    slice_id: int = 0
    num_slices: int = 1
    node: str = ""  # its name among the job's
    processes_here: tuple[int, ...] = ()  # on this node; (): unknown

    @property
    def on_node(self) -> tuple[int, ...]:
        """The processes of this node, as far as they are known: this one at least."""
        return self.processes_here or (self.process_id,)


def detect(environment: Mapping[str, str]) -> ClusterEnv | None:
    """Returns what the innermost launcher says, None where there is none.

    mpirun inside Slurm is Open MPI. Raises ValueError, naming the variable, for one that says only
    half.
    """
    for detector in (_openmpi, _slurm, _kubernetes):
        if (detected := detector(environment)) is not None:
            if not 0 <= detected.process_id < detected.num_processes:
                raise ValueError(
                    f"{detected.launcher} says that this is process {detected.process_id} of"
                    f" {detected.num_processes}"
                )
            return detected
    return None


def _openmpi(environment: Mapping[str, str]) -> ClusterEnv | None:
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    prefix = "OMPI_COMM_WORLD"
    namespace = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid")
    return ClusterEnv(
        launcher="Open MPI",
        job_id=re.sub(r"[^A-Za-z0-9_.-]", "-", namespace or "mpi"),
        attempt=1,
        process_id=_number(environment, f"{prefix}_RANK"),
        num_processes=_number(environment, f"{prefix}_SIZE"),
        local_rank=_number_if_any(environment, f"{prefix}_LOCAL_RANK"),
        local_size=_number(environment, f"{prefix}_LOCAL_SIZE", 0),
    )


def _slurm(environment: Mapping[str, str]) -> ClusterEnv | None:
    """A task of a job step. PMIx alone (`srun --mpi=pmix`) says no size: Slurm does."""
    if "SLURM_PROCID" not in environment or not environment.get("SLURM_STEP_NUM_TASKS"):
        return None
    size = _number(environment, "SLURM_STEP_NUM_TASKS")
    here = [text for text in environment.get("SLURM_GTIDS", "").split(",") if text.isdecimal()]
    local_size = len(here)
    if not here and environment.get("SLURM_STEP_NUM_NODES") == "1":
        local_size = size
    return ClusterEnv(
        launcher="Slurm",
        job_id=f"slurm-{environment.get('SLURM_JOB_ID', '0')}",
        attempt=slurm_attempt(environment) + _number(environment, "SLURM_STEP_ID", 0),
        process_id=_number(environment, "SLURM_PROCID"),
        num_processes=size,
        local_rank=_number_if_any(environment, "SLURM_LOCALID"),
        local_size=local_size,
        node=environment.get("SLURMD_NODENAME", ""),
        processes_here=tuple(map(int, here)),
    )


def slurm_attempt(environment: Mapping[str, str]) -> int:
    """Returns the first attempt's number of this run of a Slurm job.

    It is higher after each requeue, so that earlier attempts are fenced off.
    """
    return _number(environment, "SLURM_RESTART_COUNT", 0) * _ATTEMPTS_PER_REQUEUE + 1


def _kubernetes(environment: Mapping[str, str]) -> ClusterEnv | None:
    """A pod of an Indexed Job or of a JobSet, as `holdfast kubernetes` writes the manifest.

    K8S-1: the process is job index x parallelism + completion index; the completion index alone
    repeats across the jobs of a set.
    """
    if "JOB_COMPLETION_INDEX" not in environment:
        return None
    per_job = _number(environment, "PODS_PER_JOB")
    jobs = _number(environment, "JOBS", 1)
    job_index = _number(environment, "JOB_INDEX", 0)
    return ClusterEnv(
        launcher="Kubernetes",
        job_id=environment.get("JOB_ID", "") or "kubernetes",
        attempt=_number(environment, "RESTART_ATTEMPT", 0) + 1,
        process_id=job_index * per_job + _number(environment, "JOB_COMPLETION_INDEX"),
        num_processes=per_job * jobs,
        first_host=environment.get("FIRST_HOST", ""),
        slice_id=job_index,
        num_slices=jobs,
    )


def _number_if_any(environment: Mapping[str, str], key: str) -> int | None:
    return _number(environment, key) if key in environment else None


def _number(environment: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = environment.get(key, "")
    if text == "" and default is not None:
        return default
    if not text.isdecimal():
        raise ValueError(f"{key}={text!r}: expected a whole number")
    return int(text)
