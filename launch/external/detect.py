"""Who a process is, as the launcher that started it says: Slurm, Open MPI and PMIx, Kubernetes.
Pure functions of an environment.

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
    """What a launcher tells a process about itself. `first_host` is where rank 0 runs, "" where
    unknown.

    `local_rank` of `local_size` processes on this node; a size of 0: unknown.
    """

    launcher: str
    job_id: str
    attempt: int
    process_id: int
    num_processes: int
    first_host: str = ""
    local_rank: int | None = None
    local_size: int = 0
    slice_id: int = 0
    num_slices: int = 1
    node: str = ""  # its name among the job's
    processes_here: tuple[int, ...] = ()  # on this node; (): unknown

    @property
    def on_node(self) -> tuple[int, ...]:
        """The processes of this node, as far as they are known: this one at least."""
        return self.processes_here or (self.process_id,)


def detect(environment: Mapping[str, str]) -> ClusterEnv | None:
    """Returns what the innermost launcher says (mpirun inside Slurm is Open MPI); None where there
    is none.

    Raises ValueError, naming the variable, for one that says only half.
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
    namespace = (
        environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid") or "mpi"
    )
    return ClusterEnv(
        launcher="Open MPI",
        job_id=re.sub(r"[^A-Za-z0-9_.-]", "-", namespace),
        attempt=1,
        process_id=_number(environment, "OMPI_COMM_WORLD_RANK"),
        num_processes=_number(environment, "OMPI_COMM_WORLD_SIZE"),
        local_rank=(
            _number(environment, "OMPI_COMM_WORLD_LOCAL_RANK")
            if "OMPI_COMM_WORLD_LOCAL_RANK" in environment
            else None
        ),
        local_size=_number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", 0),
    )


def _slurm(environment: Mapping[str, str]) -> ClusterEnv | None:
    """A task of a job step. PMIx alone (`srun --mpi=pmix`) says no size: Slurm does."""
    if "SLURM_PROCID" not in environment or environment.get("SLURM_STEP_NUM_TASKS", "") == "":
        return None
    size = _number(environment, "SLURM_STEP_NUM_TASKS")
    here = tuple(
        int(each) for each in environment.get("SLURM_GTIDS", "").split(",") if each.isdecimal()
    )
    return ClusterEnv(
        launcher="Slurm",
        job_id=f"slurm-{environment.get('SLURM_JOB_ID', '0')}",
        attempt=slurm_attempt(environment) + _number(environment, "SLURM_STEP_ID", 0),
        process_id=_number(environment, "SLURM_PROCID"),
        num_processes=size,
        local_rank=(
            _number(environment, "SLURM_LOCALID") if "SLURM_LOCALID" in environment else None
        ),
        local_size=len(here) or (size if environment.get("SLURM_STEP_NUM_NODES") == "1" else 0),
        node=environment.get("SLURMD_NODENAME", ""),
        processes_here=here,
    )


def slurm_attempt(environment: Mapping[str, str]) -> int:
    """Returns the first attempt's number of this run of a Slurm job: higher after each requeue, so
    that earlier ones are fenced off.
    """
    return _number(environment, "SLURM_RESTART_COUNT", 0) * _ATTEMPTS_PER_REQUEUE + 1


def _kubernetes(environment: Mapping[str, str]) -> ClusterEnv | None:
    """A pod of an Indexed Job or of a JobSet, with what `holdfast kubernetes` writes into the
    manifest.

    K8S-1: the process is job index x parallelism + completion index; the completion index alone
    repeats across the jobs of a set.
    """
    if "JOB_COMPLETION_INDEX" not in environment:
        return None
    per_job, jobs = _number(environment, "PODS_PER_JOB"), _number(environment, "JOBS", 1)
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


def _number(environment: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = environment.get(key, "")
    if text == "" and default is not None:
        return default
    if not text.isdecimal():
        raise ValueError(f"{key}={text!r}: expected a whole number")
    return int(text)
