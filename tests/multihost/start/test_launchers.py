"""Who a process is, as Slurm, Open MPI and Kubernetes say: from recorded environments."""

from __future__ import annotations

import os
import socket

import pytest

from holdfast.multihost.start.launchers import ClusterEnv, detect
from tests.support.launchers import JOBSET, LWS, MPICH, OPENMPI_4, OPENMPI_5, SLURM


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (SLURM, ClusterEnv("Slurm", "slurm-77", 10_003, 3, 4, step=2, local_rank=1)),
        (OPENMPI_4, ClusterEnv("Open MPI", "2563768321", 1, 1, 3, local_size=3)),
        (OPENMPI_5, ClusterEnv("Open MPI", "prterun-node7-1234-1", 1, 2, 8, local_size=4)),
        (SLURM | OPENMPI_5, ClusterEnv("Open MPI", "prterun-node7-1234-1", 1, 2, 8, local_size=4)),
        (
            SLURM | {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.77.2"},
            ClusterEnv("Slurm", "slurm-77", 10_003, 3, 4, step=2, local_rank=1),
        ),
        (
            JOBSET,
            ClusterEnv("Kubernetes", "train", 6, 9, 12, first_host="h", slice_id=2, num_slices=3),
        ),
        (
            {"JOB_COMPLETION_INDEX": "1", "PODS_PER_JOB": "4"},
            ClusterEnv("Kubernetes", "kubernetes", 1, 1, 4),
        ),
        (MPICH, ClusterEnv("PMI", "mpi", 1, 1, 3, local_rank=1, local_size=3)),
        (SLURM | MPICH, ClusterEnv("PMI", "mpi", 1, 1, 3, local_rank=1, local_size=3)),
        (
            SLURM | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "x"},
            ClusterEnv("Slurm", "slurm-77", 10_003, 3, 4, step=2, local_rank=1),
        ),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2", "PALS_APID": "a7", "PALS_LOCAL_SIZE": "2"},
            ClusterEnv("PMI", "mpi-a7", 1, 0, 2, local_size=2),
        ),
        (
            LWS,
            ClusterEnv(
                "LeaderWorkerSet",
                "train-0.train.default",
                1,
                1,
                4,
                first_host="train-0.train.default",
                port=8476,
            ),
        ),
        ({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4"}, None),
        ({}, None),
    ],
    ids=[
        "slurm",
        "openmpi4",
        "openmpi5",
        "mpirun in slurm",
        "srun with pmix",
        "jobset",
        "indexed job",
        "mpich",
        "mpich in slurm",
        "srun with pmi2",
        "pals",
        "leader worker set",
        "batch step",
        "none",
    ],
)
def test_what_each_engine_says(environment: dict[str, str], expected: ClusterEnv | None) -> None:
    """K8S-1 among them: the process is job index x parallelism + completion index. The batch step
    of Slurm is no task.
    """
    assert detect(environment) == expected


def test_a_requeued_slurm_job_has_a_higher_attempt() -> None:
    """ENV-5: any step after a requeue is above every step before it; a later step is above an
    earlier one.
    """
    attempts = [
        detect(SLURM | {"SLURM_RESTART_COUNT": r, "SLURM_STEP_ID": s})
        for r, s in (("0", "0"), ("0", "41"), ("1", "0"), ("2", "0"))
    ]
    numbers = [found.attempt for found in attempts if found is not None]
    assert numbers == sorted(set(numbers)) and len(numbers) == 4


def test_the_processes_of_a_node() -> None:
    """Slurm names them all; Open MPI says how many there are, and which of them this is."""
    found = detect(SLURM | {"SLURM_GTIDS": "2,3"})
    assert found is not None and (found.on_node, found.local_rank, found.local_size) == (
        (2, 3),
        1,
        2,
    )
    found = detect(OPENMPI_4 | {"OMPI_COMM_WORLD_LOCAL_RANK": "1"})
    assert found is not None and (found.local_rank, found.local_size, found.on_node) == (1, 3, (1,))


def test_a_job_of_mpiexec_is_named_by_its_manager() -> None:
    """By who holds the other end of PMI_FD, where one manager has started all processes."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        said = MPICH | {"PMI_FD": str(ours.fileno())}
        here = detect(said)
        elsewhere = detect(said | {"MPI_LOCALNRANKS": "1"})
        assert here is not None and here.job_id == f"mpi-{os.getpid()}"
        assert elsewhere is not None and elsewhere.job_id == "mpi"
        ours.send(b"still open")
    with pytest.raises(ValueError, match="MPI_LOCALNRANKS='x': expected a whole number"):
        detect(said | {"MPI_LOCALNRANKS": "x"})


def test_a_launcher_that_says_half_is_refused() -> None:
    """The variable is named, with what it holds."""
    with pytest.raises(ValueError, match="OMPI_COMM_WORLD_SIZE='': expected a whole number"):
        detect({"OMPI_COMM_WORLD_RANK": "0"})
    with pytest.raises(ValueError, match="Open MPI says that this is process 3 of 3"):
        detect(OPENMPI_4 | {"OMPI_COMM_WORLD_RANK": "3"})
