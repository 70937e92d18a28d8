"""Who a process is: arguments, a launcher's environment, what jax detects."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from holdfast.multihost import ProcessSpec
from holdfast.multihost.start.discovery import DiscoveredProcess, discover_process
from tests.support.launchers import JAX, LWS, MPICH, OPENMPI_5, SLURM, TORCHRUN

SPEC = ProcessSpec(process_id=1, num_processes=2, coordinator="c:1", job_id="j", attempt=3)
CLUSTERS = (
    "HOLDFAST_",
    "SLURM_",
    "OMPI_",
    "JOB_",
    "KUBERNETES_",
    "JAX_",
    "TPU_",
    "CLOUD_TPU",
    "MEGASCALE_",
    "PMI_",
    "MPI_",
    "LWS_",
    "WORLD_SIZE",
    "RANK",
)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Takes every cluster's variables away."""
    for key in [key for key in os.environ if key.startswith(CLUSTERS)]:
        monkeypatch.delenv(key)
    return monkeypatch


@pytest.mark.filterwarnings("ignore:.*Kubernetes environment detected")
def test_a_pod_that_is_no_indexed_job_is_alone(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A notebook's, a Deployment's: jax asks the cluster for its Job, and fails. One with an index
    is told what to give.
    """
    environment.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    # As the real package does where no service account is mounted.
    (tmp_path / "kubernetes.py").write_text(
        "class config:\n"
        "    @staticmethod\n"
        "    def load_incluster_config():\n"
        "        raise LookupError('Service token file does not exist.')\n"
    )
    environment.syspath_prepend(tmp_path)
    assert discover_process(None, {}, None, 1.0) == DiscoveredProcess(None)
    environment.setenv("JOB_COMPLETION_INDEX", "0")
    with pytest.raises(ValueError, match=r"LookupError: Service token file .*`holdfast task`"):
        discover_process(None, {}, None, 1.0)
    assert os.environ["KUBERNETES_SERVICE_HOST"] == "127.0.0.1"


def test_a_spec_allows_no_other_argument() -> None:
    """Whoever gives a whole spec speaks as a launcher; a part beside it is a mistake."""
    assert discover_process(SPEC, {}, [0], 1.0) == DiscoveredProcess(SPEC, True, [0])
    message = r"initialize\(\) takes a spec or coordinator_address, process_id, not both"
    with pytest.raises(ValueError, match=message):
        discover_process(SPEC, {"coordinator": "h:1", "process_id": 1}, None, 1.0)


def test_the_environment_fills_in_what_lacks(
    environment: pytest.MonkeyPatch,
) -> None:
    """An argument beats the environment; the rest of the spec is the launcher's."""
    for key, value in SPEC.to_env().items():
        environment.setenv(key, value)
    assert discover_process(None, {}, None, 1.0) == DiscoveredProcess(SPEC, True)
    found = discover_process(None, {"coordinator": "other:2"}, None, 1.0)
    assert found.launched and found.spec is not None
    assert (found.spec.coordinator, found.spec.process_id, found.spec.attempt) == ("other:2", 1, 3)


def test_all_three_arguments_need_no_launcher(environment: pytest.MonkeyPatch) -> None:
    """The three of jax.distributed.initialize are enough, and win over a launcher's environment."""
    for key, value in SPEC.to_env().items():
        environment.setenv(key, value)
    given = {"coordinator": "d:4", "num_processes": 3, "process_id": 2}
    assert discover_process(None, given, None, 1.0) == DiscoveredProcess(
        ProcessSpec(coordinator="d:4", num_processes=3, process_id=2)
    )


def test_without_any_cluster_there_is_no_spec() -> None:
    """Nothing given and nothing found: one process alone. Half of it given: an error that names the
    rest.
    """
    assert discover_process(None, {}, None, 1.0) == DiscoveredProcess(None)
    message = (
        "initialize() knows {'process_id': 0} but not coordinator_address, num_processes: give"
        " them, or start with `holdfast run`; initialize(num_processes=1) is one process alone"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        discover_process(None, {"process_id": 0}, None, 1.0)


def test_what_jax_detects_of_slurm_is_taken(environment: pytest.MonkeyPatch) -> None:
    """Inside a Slurm step jax knows the coordinator, the count and the number; no launcher of ours
    has said so.
    """
    step = {
        "SLURM_JOB_ID": "77",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "n[1-2]",
    }
    for key, value in step.items():
        environment.setenv(key, value)
    found = discover_process(None, {}, None, 1.0)
    assert found.spec is not None and not found.launched
    assert (found.spec.process_id, found.spec.num_processes) == (3, 4)
    assert found.spec.coordinator.startswith("n1:")


@pytest.mark.parametrize("answers", [True, False])
def test_slurm_reads_its_list_of_nodes(
    environment: pytest.MonkeyPatch, tmp_path: Path, answers: bool
) -> None:
    """jax takes rack[1-2]n[3-4] for rack1; where Slurm does not say, an error has the list."""
    nodes = "rack[1-2]n[3-4],login"
    step = {
        "SLURM_JOB_ID": "77",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": nodes,
    }
    for key, value in step.items():
        environment.setenv(key, value)
    stub = tmp_path / "scontrol"
    says = '[ "$*" = "show hostnames $SLURM_STEP_NODELIST" ] && printf "rack1n3\\nrack1n4\\n"'
    stub.write_text(f"#!/bin/sh\n{says if answers else 'exit 1'}\n")
    stub.chmod(0o755)
    environment.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if answers:
        found = discover_process(None, {}, None, 1.0)
        assert found.spec is not None and found.spec.coordinator.startswith("rack1n3:")
    else:
        with pytest.raises(
            ValueError,
            match=(
                r"scontrol show hostnames 'rack\[1-2\]n\[3-4\],login' failed: .*; give"
                r" coordinator_address="
            ),
        ):
            discover_process(None, {}, None, 1.0)
    given = discover_process(None, {"coordinator": "host:1"}, None, 1.0)
    assert given.spec is not None and given.spec.coordinator == "host:1"


def set_all(environment: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for key, value in values.items():
        environment.setenv(key, value)


@pytest.mark.parametrize(
    ("launcher", "known"),
    [
        (TORCHRUN, "{'num_processes': 4, 'process_id': 3} of torchrun's WORLD_SIZE=4"),
        ({"WORLD_SIZE": "4"}, "{'num_processes': 4} of torchrun's WORLD_SIZE=4"),
        ({"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "1"}, "of Flux's FLUX_JOB_SIZE=2"),
        (MPICH | {"MPI_LOCALNRANKS": "1"}, "{'num_processes': 3, 'process_id': 1} of PMI"),
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, "{'num_processes': 3, 'process_id': 1} of PMI"),
        (OPENMPI_5, "{'num_processes': 8, 'process_id': 2} of Open MPI"),
        ({"JAX_COORDINATOR_ADDRESS": "h:1"}, "{'coordinator': 'h:1'}"),
        (LWS | {"LWS_LEADER_ADDRESS": ""}, "of LeaderWorkerSet"),
    ],
)
def test_no_process_is_alone_in_silence(
    environment: pytest.MonkeyPatch, launcher: dict[str, str], known: str
) -> None:
    """A launcher that says that there are others, but not where to meet them, is not enough; an
    argument fills in what lacks. Who is to be alone says so, and is.
    """
    set_all(environment, launcher)
    with pytest.raises(ValueError, match=re.escape(known)) as caught:
        discover_process(None, {}, None, 1.0)
    assert "initialize(num_processes=1) is one process alone" in str(caught.value)
    assert discover_process(None, {"num_processes": 1}, None, 1.0) == DiscoveredProcess(None)
    if "process_id" in known:
        found = discover_process(None, {"coordinator": "h:1"}, None, 1.0).spec
        assert found is not None and found.coordinator == "h:1" and found.num_processes > 1


@pytest.mark.parametrize(
    "launcher",
    [
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"},
        LWS | {"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"},
        JAX | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"},
        SLURM | {"PMI_RANK": "0", "PMI_SIZE": "1"},  # mpiexec in a step
    ],
)
def test_a_size_of_one_is_alone(environment: pytest.MonkeyPatch, launcher: dict[str, str]) -> None:
    """As the nearest launcher says."""
    set_all(environment, launcher)
    assert discover_process(None, {}, None, 1.0) == DiscoveredProcess(None)


def test_alone_in_a_job_of_a_launcher_of_ours(environment: pytest.MonkeyPatch) -> None:
    """num_processes=1 is alone there too; in a job of one it joins that."""
    set_all(environment, SPEC.to_env())
    assert discover_process(None, {"num_processes": 1}, None, 1.0) == DiscoveredProcess(None)
    environment.setenv("HOLDFAST_NUM_PROCESSES", "1")
    environment.setenv("HOLDFAST_PROCESS_ID", "0")
    assert discover_process(None, {"num_processes": 1}, None, 1.0).launched


def test_a_leader_worker_set_meets_at_its_leader(environment: pytest.MonkeyPatch) -> None:
    """At a port that jax's variable may set."""
    set_all(environment, LWS)
    found = discover_process(None, {}, None, 1.0).spec
    assert found is not None
    assert (found.coordinator, found.process_id, found.num_processes) == (
        "train-0.train.default:8476",
        1,
        4,
    )
    assert found.job_id == "train-0.train.default"
    environment.setenv("JAX_COORDINATOR_PORT", "9")
    found = discover_process(None, {}, None, 1.0).spec
    assert found is not None and found.coordinator == "train-0.train.default:9"


def test_variables_of_jax_are_enough(environment: pytest.MonkeyPatch) -> None:
    """By both names that programs give them; an address of jax's wins over what jax detects."""
    set_all(environment, JAX)
    expected = DiscoveredProcess(ProcessSpec(coordinator="h:1", num_processes=2, process_id=1))
    assert discover_process(None, {}, None, 1.0) == expected
    for new, old in (("PROCESS_COUNT", "NUM_PROCESSES"), ("PROCESS_INDEX", "PROCESS_ID")):
        environment.setenv(f"JAX_{new}", JAX[f"JAX_{old}"])
        environment.delenv(f"JAX_{old}")
    assert discover_process(None, {}, None, 1.0) == expected
    for key in ("JAX_PROCESS_COUNT", "JAX_PROCESS_INDEX"):
        environment.delenv(key)
    set_all(environment, SLURM)
    found = discover_process(None, {}, None, 1.0).spec
    assert found is not None and (found.coordinator, found.process_id) == ("h:1", 3)
    environment.setenv("JAX_PROCESS_ID", "x")
    with pytest.raises(ValueError, match="JAX_PROCESS_ID='x': expected a whole number"):
        discover_process(None, {}, None, 1.0)


def test_launchers_that_differ_are_refused(environment: pytest.MonkeyPatch) -> None:
    """torchrun in each task of a step: all tasks of a node would be one process for Slurm. Counts
    that a batch script exports for its srun are no contradiction.
    """
    set_all(environment, SLURM | {"WORLD_SIZE": "8", "RANK": "5"})
    with pytest.raises(ValueError, match="torchrun's WORLD_SIZE=8 says another number of proc"):
        discover_process(None, {}, None, 1.0)
    environment.setenv("WORLD_SIZE", "4")
    found = discover_process(None, {}, None, 1.0).spec
    assert found is not None and (found.process_id, found.num_processes) == (3, 4)


def test_a_step_of_slurm_is_a_job(environment: pytest.MonkeyPatch) -> None:
    """Job, step and restart are who it is, whether jax detects the numbers or the program gives
    them; a name that the environment gives alone is instead. Other numbers are not the step's.
    """
    set_all(environment, SLURM)
    as_given = {"coordinator": "h:1", "num_processes": 4, "process_id": 3}
    for given in ({}, as_given):
        found = discover_process(None, given, None, 1.0).spec
        assert found is not None and (found.job_id, found.attempt) == ("slurm-77.2", 2)
    # A program that is started on each node by an srun of its own.
    found = discover_process(None, as_given | {"num_processes": 8}, None, 1.0).spec
    assert found is not None and (found.job_id, found.attempt) == ("job", 0)
    environment.setenv("HOLDFAST_JOB_ID", "mine")
    found = discover_process(None, {}, None, 1.0).spec
    assert found is not None and (found.job_id, found.attempt) == ("mine", 0)
    environment.setenv("HOLDFAST_ATTEMPT", "4")
    found = discover_process(None, as_given, None, 1.0).spec
    assert found is not None and (found.job_id, found.attempt) == ("mine", 4)
