"""`holdfast task`: becomes a process of a job that another launcher started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from holdfast.coordination.process.job_folder import JobFolder
from tests.support.launchers import JOBSET, OPENMPI_5
from tests.support.processes import wait_until_ended

HOLDFAST = Path(sys.executable).parent / "holdfast"


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
    assert "no launcher is found: expected the environment of srun, mpirun, or a Kubernetes Indexed Job" in run_task("--", "true").stderr
    done = run_task("--", "true", **OPENMPI_5)
    assert done.returncode == 1
    assert "give --coordinator HOST:PORT, or --rendezvous with a shared folder" in done.stderr


def test_a_rerun_of_a_job_id_does_not_take_the_address_of_the_run_before(short_path: Path) -> None:
    """Open MPI gives an id again: process 1, though it comes first, waits for the coordinator of this run."""
    environment = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "77", "TMPDIR": str(short_path)}
    folder = short_path / f"holdfast-{os.getuid()}"
    folder.mkdir(mode=0o700)
    (folder / "77.1.json").write_text('{"coordinator": "unix:/nonexistent/coordinator"}')
    code = "import os; print(os.environ['HOLDFAST_COORDINATOR'])"
    said: list[str] = []

    def task(rank: str) -> None:
        said.append(run_task("--", sys.executable, "-S", "-c", code, OMPI_COMM_WORLD_RANK=rank, **environment).stdout)

    first = threading.Thread(target=task, args=("1",))
    first.start()
    task("0")
    first.join(60)
    (job,) = [found for path in folder.glob("job-*") if (found := JobFolder(path).job()) is not None]
    assert said == [f"{job.address}\n"] * 2 and job.job_id == "77"
    assert wait_until_ended([job.pid], within_s=40), "its starter is gone, and nobody has come"


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
