"""Who a process is, as Slurm, Open MPI and Kubernetes say: from recorded environments, and from a real mpirun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.launch import KubernetesJob, render_kubernetes
from holdfast.launch.external.detect import ClusterEnv, detect, first_host
from tests.support.paths import SUPPORT

HOLDFAST = Path(sys.executable).parent / "holdfast"
GOLDEN = SUPPORT / "kubernetes"

SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_RESTART_COUNT": "1",
}
OPENMPI_4 = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "OMPI_MCA_ess_base_jobid": "2563768321",
    "PMIX_NAMESPACE": "2563768321",
    "PMIX_RANK": "1",
}
OPENMPI_5 = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-node7-1234@1",
    "PMIX_RANK": "2",
}
JOBSET = {
    "JOB_COMPLETION_INDEX": "1",
    "JOB_INDEX": "2",
    "PODS_PER_JOB": "4",
    "JOBS": "3",
    "JOB_ID": "train",
    "RESTART_ATTEMPT": "5",
    "FIRST_HOST": "h",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (SLURM, ClusterEnv("Slurm", "slurm-77", 10_003, 3, 4, first_host="gpu03")),
        (OPENMPI_4, ClusterEnv("Open MPI", "2563768321", 1, 1, 3, local_size=3)),
        (OPENMPI_5, ClusterEnv("Open MPI", "prterun-node7-1234-1", 1, 2, 8, local_size=4)),
        (SLURM | OPENMPI_5, ClusterEnv("Open MPI", "prterun-node7-1234-1", 1, 2, 8, local_size=4)),
        (
            SLURM | {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.77.2"},
            ClusterEnv("Slurm", "slurm-77", 10_003, 3, 4, first_host="gpu03"),
        ),
        (JOBSET, ClusterEnv("Kubernetes", "train", 6, 9, 12, first_host="h", slice_id=2, num_slices=3)),
        ({"JOB_COMPLETION_INDEX": "1", "PODS_PER_JOB": "4"}, ClusterEnv("Kubernetes", "kubernetes", 1, 1, 4)),
        ({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4"}, None),
        ({}, None),
    ],
    ids=["slurm", "openmpi4", "openmpi5", "mpirun in slurm", "srun with pmix", "jobset", "indexed job", "batch step", "none"],
)
def test_what_each_engine_says(environment: dict[str, str], expected: ClusterEnv | None) -> None:
    """K8S-1 among them: the process is job index x parallelism + completion index. The batch step of Slurm is no task."""
    assert detect(environment) == expected


def test_a_requeued_slurm_job_has_a_higher_attempt() -> None:
    """ENV-5: any step after a requeue is above every step before it; a later step is above an earlier one."""
    attempts = [
        detect(SLURM | {"SLURM_RESTART_COUNT": r, "SLURM_STEP_ID": s}) for r, s in (("0", "0"), ("0", "41"), ("1", "0"), ("2", "0"))
    ]
    numbers = [found.attempt for found in attempts if found is not None]
    assert numbers == sorted(set(numbers)) and len(numbers) == 4


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("n1", "n1"), ("n[1-2]", "n1"), ("n[01-03,7],m", "n01"), ("a,b[1-2]", "a"), ("rack2-n[4,6]-ib", "rack2-n4-ib"), ("", "")],
)
def test_the_first_host_of_a_compressed_list(nodelist: str, host: str) -> None:
    """Slurm's short form: only the first host is needed, leading zeros are kept."""
    assert first_host(nodelist) == host


def test_an_engine_that_says_only_half_is_an_error() -> None:
    """The variable is named, with what it holds."""
    with pytest.raises(ValueError, match="OMPI_COMM_WORLD_SIZE='': expected a whole number"):
        detect({"OMPI_COMM_WORLD_RANK": "0"})
    with pytest.raises(ValueError, match="Open MPI says that this is process 3 of 3"):
        detect(OPENMPI_4 | {"OMPI_COMM_WORLD_RANK": "3"})


def run_task(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "OMPI_", "HOLDFAST_"))}
    return subprocess.run([HOLDFAST, "task", *arguments], env=clean | environment, capture_output=True, text=True, check=False, timeout=60)


def test_a_task_becomes_its_command() -> None:
    """The ProcessSpec is in the environment; the exit code is the command's; stale slices are replaced and logged."""
    keys = ("HOLDFAST_PROCESS_ID", "HOLDFAST_ATTEMPT", "MEGASCALE_SLICE_ID")
    code = f"import os, sys; print(*(os.environ[key] for key in {keys})); sys.exit(7)"
    done = run_task("--coordinator", "c:1", "--", sys.executable, "-S", "-c", code, **JOBSET, MEGASCALE_SLICE_ID="9")
    assert (done.returncode, done.stdout) == (7, "9 6 2\n"), done.stderr
    assert "holdfast: MEGASCALE_SLICE_ID: '9' -> '2'" in done.stderr


def test_what_a_task_cannot_do_is_one_clear_error() -> None:
    """No engine; several machines and no way to meet."""
    assert "no engine is found: expected the environment of srun, mpirun, or a Kubernetes Indexed Job" in run_task("--", "true").stderr
    done = run_task("--", "true", **OPENMPI_5)
    assert done.returncode == 1
    assert "give --coordinator HOST:PORT, or --rendezvous with a shared folder" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed: scripts/install_system_packages.sh")
def test_mpirun_runs_a_job(tmp_path: Path) -> None:
    """Show 4: three processes of a real mpirun find each other, at one coordinator that process 0 started."""
    script = tmp_path / "program.py"
    script.write_text(
        """
import os, sys
import jax
from holdfast import multihost
multihost.initialize()
largest = multihost.global_max([jax.process_index()])[0]
with open(f"{sys.argv[1]}/{os.environ['OMPI_COMM_WORLD_RANK']}", "w") as file:
    print(jax.process_index(), jax.process_count(), largest, os.environ["HOLDFAST_COORDINATOR"], file=file)
multihost.shutdown()
"""
    )
    root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    command = ["mpirun", *root, "--oversubscribe", "-n", "3", str(HOLDFAST), "task", "--", sys.executable, str(script), str(tmp_path)]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert [words[:3] for words in said] == [["0", "3", "2"], ["1", "3", "2"], ["2", "3", "2"]]
    assert len({words[3] for words in said}) == 1


@pytest.mark.parametrize("name", ["job", "jobset"])
def test_manifests_are_as_the_golden_files(name: str) -> None:
    """An Indexed Job for one slice and a JobSet for two; never run on a cluster."""
    sliced = {"jobs": 2, "resources": {"google.com/tpu": "4"}, "node_selector": {"cloud.google.com/gke-tpu-topology": "2x4"}}
    changes = sliced if name == "jobset" else {}
    job = KubernetesJob("digits", "example.org/digits:1", ("python", "train.py", "--directory", "gs://b/ckpt"), 4, **changes)  # type: ignore[arg-type]
    assert render_kubernetes(job) == (GOLDEN / f"{name}.yaml").read_text()


def test_manifests_are_yaml(tmp_path: Path) -> None:
    """The command line writes what a YAML parser reads back; impossible sizes and names are refused."""
    yaml = pytest.importorskip("yaml")
    base = [str(HOLDFAST), "kubernetes", "--image", "i:1"]
    done = subprocess.run(
        [*base, "--name", "j", "-n", "8", "--slices", "2", "--", "python", "-c", 'print("a: b")'],
        capture_output=True,
        text=True,
        check=True,
    )
    documents = list(yaml.safe_load_all(done.stdout))
    assert [document["kind"] for document in documents] == ["Service", "Deployment", "JobSet"]
    pod = documents[2]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["command"][-1] == 'print("a: b")'
    assert documents[1]["spec"]["template"]["spec"]["containers"][0]["command"][2] == "--num-processes=8"
    for bad, message in ((["--name", "J", "-n", "1"], "name='J'"), (["--name", "j", "-n", "3", "--slices", "2"], "slices of one size")):
        done = subprocess.run([*base, *bad, "--", "true"], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and message in done.stderr
