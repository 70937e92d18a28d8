"""Who a process is, as its launcher says: Slurm, Open MPI and PMIx, PMI, Kubernetes, and others.

Sources: srun(1) and sbatch(1), "output environment variables"; mpirun(1) of Open MPI 4 and 5;
MPICH's wiki, "PMI v1"; Kubernetes, "Indexed Job"; JobSet, "labels and annotations";
LeaderWorkerSet, "labels, annotations and environment variables"; torchrun, "environment
variables". `holdfast task` and `initialize()` turn what is found into a ProcessSpec.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..parent import peer_pid

_ATTEMPTS_PER_REQUEUE = 10_000
ANY_MPI_JOB = "mpi"
"""The name of a job of an mpirun that says none."""

_LWS_PORT = 8476  # of the coordinator, at the leader's address; jax's own on TPUs


@dataclass(frozen=True)
class ClusterEnv:
    """What a launcher tells a process about itself."""

    launcher: str
    job_id: str
    attempt: int
    process_id: int
    num_processes: int
    first_host: str = ""  # where rank 0 runs; "": unknown
    port: int = 0  # of a coordinator at `first_host`
    step: int | None = None  # of Slurm's job; each is a program of its own
    local_rank: int | None = None  # among the processes of this node
    local_size: int = 0  # their number; 0: unknown
    slice_id: int = 0
    num_slices: int = 1
    processes_here: tuple[int, ...] = ()  # on this node; (): unknown

    @property
    def on_node(self) -> tuple[int, ...]:
        """The processes of this node, as far as they are known: this one at least."""
        return self.processes_here or (self.process_id,)

    @property
    def on_one_machine(self) -> bool:
        """Whether all processes of the job are on this machine."""
        return self.local_size == self.num_processes

    @property
    def bare_job(self) -> tuple[str, int]:
        """Job and attempt of a program that the launcher has started itself: a step of Slurm is a
        job, and a requeue an attempt.
        """
        if self.step is None:
            return self.job_id, self.attempt
        return f"{self.job_id}.{self.step}", self.attempt // _ATTEMPTS_PER_REQUEUE + 1


def detect(environment: Mapping[str, str]) -> ClusterEnv | None:
    """Returns what the innermost launcher says, None where there is none.

    mpirun inside Slurm is Open MPI. Raises ValueError, naming the variable, for one that says only
    half.
    """
    return detect_starter(environment) or _checked(_kubernetes(environment))


def detect_starter(environment: Mapping[str, str]) -> ClusterEnv | None:
    """Returns what `detect` does, but of a manifest of ours."""
    for detector in (_openmpi, _pmi, _slurm, _leader_worker_set):
        if (detected := _checked(detector(environment))) is not None:
            return detected
    return None


def _checked(detected: ClusterEnv | None) -> ClusterEnv | None:
    if detected is not None and not 0 <= detected.process_id < detected.num_processes:
        raise ValueError(
            f"{detected.launcher} says that this is process {detected.process_id} of"
            f" {detected.num_processes}"
        )
    return detected


def _openmpi(environment: Mapping[str, str]) -> ClusterEnv | None:
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    prefix = "OMPI_COMM_WORLD"
    namespace = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid")
    return ClusterEnv(
        launcher="Open MPI",
        job_id=_name(namespace or ANY_MPI_JOB),
        attempt=1,
        process_id=number_in(environment, f"{prefix}_RANK"),
        num_processes=number_in(environment, f"{prefix}_SIZE"),
        local_rank=_number_if_any(environment, f"{prefix}_LOCAL_RANK"),
        local_size=number_in(environment, f"{prefix}_LOCAL_SIZE", 0),
    )


def _pmi(environment: Mapping[str, str]) -> ClusterEnv | None:
    """A process of MPICH's, Intel MPI's or Cray MPICH's mpiexec; None where srun plays its part."""
    if "PMI_RANK" not in environment or "PMI_SIZE" not in environment:
        return None
    rank = number_in(environment, "PMI_RANK")
    size = number_in(environment, "PMI_SIZE")
    slurm = _slurm(environment)
    if slurm is not None and (slurm.process_id, slurm.num_processes) == (rank, size):
        return None
    local_size = number_in(environment, first_set(environment, _PMI_LOCAL_SIZES), 0)
    job = environment.get(first_set(environment, _PMI_JOBS), "")
    if not job and local_size == size:  # each machine has a process manager of its own
        job = _pmi_peer(environment)
    return ClusterEnv(
        launcher="PMI",
        job_id=_name(f"{ANY_MPI_JOB}-{job}" if job else ANY_MPI_JOB),
        attempt=1,
        process_id=rank,
        num_processes=size,
        local_rank=_number_if_any(environment, first_set(environment, _PMI_LOCAL_RANKS)),
        local_size=local_size,
    )


_PMI_LOCAL_SIZES = ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE")
_PMI_LOCAL_RANKS = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID")
_PMI_JOBS = ("PALS_APID", "ALPS_APP_ID")


def _pmi_peer(environment: Mapping[str, str]) -> str:
    """Returns the pid of this machine's process manager, one for all processes of a job here.

    It holds the other end of the socket that each of them has inherited: "" where there is none.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        inherited = socket.socket(fileno=int(environment.get("PMI_FD", "")))
        try:
            return f"{peer_pid(inherited) or ''}"
        finally:
            inherited.detach()
    return ""


def _leader_worker_set(environment: Mapping[str, str]) -> ClusterEnv | None:
    """A pod of a LeaderWorkerSet; a group of pods is a job, and its leader process 0."""
    if "LWS_GROUP_SIZE" not in environment:
        return None
    leader = environment.get("LWS_LEADER_ADDRESS", "")
    return ClusterEnv(
        launcher="LeaderWorkerSet",
        job_id=leader or "lws",
        attempt=1,
        process_id=number_in(environment, "LWS_WORKER_INDEX"),
        num_processes=number_in(environment, "LWS_GROUP_SIZE"),
        first_host=leader,
        port=number_in(environment, "JAX_COORDINATOR_PORT", _LWS_PORT),
    )


# Launchers that say size and rank, and nowhere to meet: where torchrun's processes meet, its own
# agent listens.
_COUNTED = (
    ("torchrun", "WORLD_SIZE", "RANK"),
    ("Flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    ("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    ("MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
)


def counted_by(environment: Mapping[str, str]) -> tuple[str, dict[str, int]]:
    """Returns what a launcher that only counts its processes says, with the names of the variables:
    of the first that has started more than one.
    """
    for launcher, size, rank in _COUNTED:
        count = number_in(environment, size, 1)
        if count > 1:
            said = {"num_processes": count}
            if rank in environment:
                said["process_id"] = number_in(environment, rank)
            return f"{launcher}'s {size}={count}", said
    return "", {}


def _slurm(environment: Mapping[str, str]) -> ClusterEnv | None:
    """A task of a job step. PMIx alone (`srun --mpi=pmix`) says no size: Slurm does."""
    if "SLURM_PROCID" not in environment or not environment.get("SLURM_STEP_NUM_TASKS"):
        return None
    size = number_in(environment, "SLURM_STEP_NUM_TASKS")
    step = number_in(environment, "SLURM_STEP_ID", 0)
    here = [text for text in environment.get("SLURM_GTIDS", "").split(",") if text.isdecimal()]
    local_size = len(here)
    if not here and environment.get("SLURM_STEP_NUM_NODES") == "1":
        local_size = size
    return ClusterEnv(
        launcher="Slurm",
        job_id=f"slurm-{environment.get('SLURM_JOB_ID', '0')}",
        attempt=slurm_attempt(environment) + step,
        process_id=number_in(environment, "SLURM_PROCID"),
        num_processes=size,
        step=step,
        local_rank=_number_if_any(environment, "SLURM_LOCALID"),
        local_size=local_size,
        processes_here=tuple(map(int, here)),
    )


def slurm_attempt(environment: Mapping[str, str]) -> int:
    """Returns the first attempt's number of this run of a Slurm job.

    It is higher after each requeue, so that earlier attempts are fenced off.
    """
    return number_in(environment, "SLURM_RESTART_COUNT", 0) * _ATTEMPTS_PER_REQUEUE + 1


def _kubernetes(environment: Mapping[str, str]) -> ClusterEnv | None:
    """A pod of an Indexed Job or of a JobSet, as `holdfast kubernetes` writes the manifest.

    K8S-1: the process is job index x parallelism + completion index; the completion index alone
    repeats across the jobs of a set.
    """
    if "JOB_COMPLETION_INDEX" not in environment:
        return None
    per_job = number_in(environment, "PODS_PER_JOB")
    jobs = number_in(environment, "JOBS", 1)
    job_index = number_in(environment, "JOB_INDEX", 0)
    return ClusterEnv(
        launcher="Kubernetes",
        job_id=environment.get("JOB_ID", "") or "kubernetes",
        attempt=number_in(environment, "RESTART_ATTEMPT", 0) + 1,
        process_id=job_index * per_job + number_in(environment, "JOB_COMPLETION_INDEX"),
        num_processes=per_job * jobs,
        first_host=environment.get("FIRST_HOST", ""),
        slice_id=job_index,
        num_slices=jobs,
    )


def _name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text)


def first_set(environment: Mapping[str, str], keys: Sequence[str]) -> str:
    """Returns the first of the variables that is set, "" where none is."""
    return next((key for key in keys if environment.get(key)), "")


def _number_if_any(environment: Mapping[str, str], key: str) -> int | None:
    return number_in(environment, key) if key in environment else None


def number_in(environment: Mapping[str, str], key: str, default: int | None = None) -> int:
    """Returns a variable's whole number, `default` where it is not set. Raises ValueError."""
    text = environment.get(key, "")
    if text == "" and default is not None:
        return default
    if not text.isdecimal():
        raise ValueError(f"{key}={text!r}: expected a whole number")
    return int(text)
