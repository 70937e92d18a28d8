"""`holdfast task`: becomes a process of a job that another launcher started."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.coordination import CoordinationError, StatusClient
from holdfast.coordination.process.job_folder import JobFolder, digest_of, user_folder
from holdfast.launch.external import task
from holdfast.launch.external.task import ALL, MARK
from holdfast.launch.workers.secrets import JobSecrets, write_files
from holdfast.multihost import StartupTimeout
from tests.support.inherited import WAYS, after
from tests.support.launchers import JOBSET, OPENMPI_5, SLURM
from tests.support.paths import program
from tests.support.processes import wait_until, wait_until_ended

HOLDFAST = Path(sys.executable).parent / "holdfast"


def run_task(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM_", "OMPI_", "HOLDFAST_"))
    }
    return subprocess.run(
        [HOLDFAST, "task", *arguments],
        env=clean | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_task_becomes_its_command() -> None:
    """The ProcessSpec is in the environment; the exit code is the command's; stale slices are
    replaced and logged.
    """
    keys = ("HOLDFAST_PROCESS_ID", "HOLDFAST_ATTEMPT", "MEGASCALE_SLICE_ID")
    code = f"import os, sys; print(*(os.environ[key] for key in {keys})); sys.exit(7)"
    done = run_task(
        "--coordinator",
        "c:1",
        "--",
        sys.executable,
        "-S",
        "-c",
        code,
        **JOBSET,
        MEGASCALE_SLICE_ID="9",
    )
    assert (done.returncode, done.stdout) == (7, "9 6 2\n"), done.stderr
    assert "holdfast: MEGASCALE_SLICE_ID: '9' -> '2'" in done.stderr


@pytest.mark.parametrize(
    "way", [way if way == "both" else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]
)
def test_signals_that_are_inherited_hide_no_end(way: str) -> None:
    """Who starts the task may ignore or block SIGCHLD: its exit code is the command's."""
    task = [HOLDFAST, "task", "--coordinator", "c:1", "--", sys.executable, "-S", "-c"]
    done = subprocess.run(
        after(WAYS[way], *task, "raise SystemExit(3)"),
        env=os.environ | JOBSET,
        check=False,
        timeout=60,
    )
    assert done.returncode == 3


def test_a_signal_reaches_the_command_of_a_task() -> None:
    """SIGTERM is the command's to handle; its exit code is the task's. Killed, the task takes its
    command along.
    """
    code = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print(os.getpid(), flush=True)
while True:
    time.sleep(600)
"""
    command = [HOLDFAST, "task", "--coordinator", "c:1", "--", sys.executable, "-S", "-c", code]
    for number, ended in ((signal.SIGTERM, 7), (signal.SIGKILL, -signal.SIGKILL)):
        with subprocess.Popen(
            command, env=os.environ | JOBSET, stdout=subprocess.PIPE, text=True
        ) as task:
            assert task.stdout is not None
            pid = int(task.stdout.readline())
            task.send_signal(number)
            assert task.wait(60) == ended and wait_until_ended([pid])


def test_an_order_is_for_one_process_of_a_step() -> None:
    """All tasks of a step read the same input: each does what names it, or all."""
    code = """
import signal, sys
signal.signal(signal.SIGUSR1, lambda *_: print("another's", flush=True))
signal.signal(signal.SIGUSR2, lambda *_: print("mine", flush=True))
print("here", flush=True)
while True:
    signal.pause()
"""
    options = ("--report", "--coordinator", "c:1", "--")
    with subprocess.Popen(
        [HOLDFAST, "task", *options, sys.executable, "-S", "-c", code],
        env=os.environ | SLURM,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as task:
        assert task.stdin is not None and task.stdout is not None
        me = int(SLURM["SLURM_PROCID"])
        lines = iter(task.stdout.readline, "")
        assert "here\n" in lines
        orders = [(me + 1, signal.SIGUSR1), (me, signal.SIGUSR2)]
        for process, number in orders:
            task.stdin.write(f"signal {process} {int(number)}\n")
            task.stdin.flush()
        assert next(lines) == "mine\n"
        task.stdin.write(f"signal {ALL} {int(signal.SIGKILL)}\n")
        task.stdin.flush()
        assert list(lines) == [f"{MARK}exited -9\n"]


def test_a_task_fails_with_one_clear_error() -> None:
    """No engine; several machines and no way to meet."""
    assert (
        "no launcher is found: expected the environment of srun, mpiexec, or a Kubernetes"
        " Indexed Job" in run_task("--", "true").stderr
    )
    done = run_task("--", "true", **OPENMPI_5)
    assert done.returncode == 1
    assert "give --coordinator HOST:PORT, or --rendezvous with a shared folder" in done.stderr


def test_a_command_that_cannot_start_is_reported(tmp_path: Path) -> None:
    """The engine of Slurm learns of it at once, and not from the time-out of the others."""
    done = run_task(
        "--report", "--coordinator", "c:1", "--secrets", str(tmp_path), "--", "true", **OPENMPI_5
    )
    assert (
        done.returncode == 1
        and f"{tmp_path}/token" in done.stderr
        and done.stdout == f"{MARK}exited 1\n"
    )


@pytest.mark.slow
def test_a_rerun_takes_no_old_address(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job comes again under its id, which is any text: process 1, though it comes first, waits
    for the coordinator of this run.
    """
    environment = {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "TMPDIR": str(short_path),
    }
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    folder = user_folder(create=True)
    old = folder / f"{digest_of('77/a')}.1.json"
    old.write_text('{"coordinator": "unix:/nonexistent/coordinator"}')
    code = "import os; print(os.environ['HOLDFAST_COORDINATOR'])"
    command = ["--job-id", "77/a", "--", sys.executable, "-S", "-c", code]
    said: list[str] = []

    def task(rank: str) -> None:
        said.append(run_task(*command, OMPI_COMM_WORLD_RANK=rank, **environment).stdout)

    first = threading.Thread(target=task, args=("1",))
    first.start()
    task("0")
    first.join(60)
    (job,) = [
        found for path in folder.glob("job-*") if (found := JobFolder(path).job()) is not None
    ]
    assert said == [f"{job.address}\n"] * 2 and job.job_id == "77/a"
    assert wait_until_ended([job.pid], within_s=40), "its starter is gone, and nobody has come"


@pytest.mark.parametrize(
    ("way", "shell"),
    [("thread", ""), pytest.param("ends", '"$@" | cat', marks=pytest.mark.slow)],
)
def test_a_process_that_has_raised_ends(short_path: Path, way: str, shell: str) -> None:
    """A thread that goes on does not keep it, nor does the shell of a pipe hide it: the task fails,
    and the other process with it, long before its barrier's timeout.
    """
    program_of_each = [sys.executable, str(program("raises")), way]
    command = ["bash", "-c", shell, "bash", *program_of_each] if shell else program_of_each
    tasks = [
        subprocess.Popen(
            [HOLDFAST, "task", "--grace-s=1", "--", *command],
            env=os.environ
            | {
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "OMPI_COMM_WORLD_RANK": rank,
                "PMIX_NAMESPACE": "raises",
                "TMPDIR": str(short_path),
                "JAX_PLATFORMS": "cpu",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    waits, raises = (task.communicate(timeout=60)[1] for task in tasks)
    assert [bool(tasks[0].returncode), tasks[1].returncode] == [way != "ends", 1], waits + raises
    if way == "thread":
        failed = "process 1 has failed, and does not end: ValueError: the loss is NaN; ending it"
        assert f"holdfast: {failed}" in raises
        assert "ProcessLost" in waits


@pytest.mark.parametrize(
    ("how", "count", "code"),
    [
        ("stops", 2, 75),
        pytest.param("stops", 1, 75, marks=pytest.mark.slow),
        pytest.param("hears_nothing", 1, 0, marks=pytest.mark.slow),
    ],
)
def test_a_program_that_stops_as_asked_is_not_done(
    short_path: Path, how: str, count: int, code: int
) -> None:
    """A notice to one process: all stop, their programs end with 0, and whoever has started them
    hears that they were preempted. One that has never asked has come to its own end.
    """
    common = os.environ | {
        "OMPI_COMM_WORLD_SIZE": str(count),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(count),
        "PMIX_NAMESPACE": "stops",
        "TMPDIR": str(short_path),
        "JAX_PLATFORMS": "cpu",
    }
    tasks = [
        subprocess.Popen(
            [HOLDFAST, "task", "--", sys.executable, str(program("task_stops")), how],
            env=common | {"OMPI_COMM_WORLD_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    assert [each.stdout.readline() for each in tasks if each.stdout] == ["here\n"] * count
    tasks[0].send_signal(signal.SIGTERM)
    for each in tasks:
        each.communicate(timeout=60)
    assert [each.returncode for each in tasks] == [code] * count


@pytest.mark.slow
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_job_is_started_again_as_a_whole(tmp_path: Path, order: tuple[int, int]) -> None:
    """As Kubernetes does, before the coordinator has ended: the new processes wait for each other,
    and what the former ones have left is none of theirs. The coordinator ends with them.
    """
    recoverable = ("--recoverable", "--survivable", "--linger-s=60", "--startup-timeout-s=0")
    coordinator = subprocess.Popen(
        [HOLDFAST, "coordinator", "--num-processes=2", *recoverable],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert coordinator.stdout is not None
    address = coordinator.stdout.readline().split()[-1]

    def start(index: int, life: str) -> subprocess.Popen[bytes]:
        job = {"JOB_COMPLETION_INDEX": str(index), "PODS_PER_JOB": "2", "JOB_ID": "train"}
        command = [sys.executable, str(program("task_lives")), str(tmp_path), life]
        return subprocess.Popen(
            [HOLDFAST, "task", "--coordinator", address, "--", *command],
            env=os.environ | job | {"JAX_PLATFORMS": "cpu"},
        )

    try:
        first = [start(index, "first") for index in (0, 1)]
        met = [tmp_path / f"first.{index}" for index in (0, 1)]
        wait_until(lambda: all(path.exists() and path.read_text() for path in met), within_s=90)
        os.kill(int(met[1].read_text().split()[0]), signal.SIGKILL)
        assert [task.wait(60) for task in first] == [1, 128 + signal.SIGKILL]
        second = [start(index, "second") for index in order]
        assert [task.wait(100) for task in second] == [0, 0]
        for index in (0, 1):
            assert (tmp_path / f"second.{index}").read_text().split()[1:] == ["second", "1"]
        assert coordinator.wait(30) == 0
    finally:
        coordinator.kill()
        coordinator.communicate()


@contextlib.contextmanager
def two_machines(short_path: Path, *options: str) -> Iterator[list[dict[str, Any]]]:
    """Yields what two processes say once they have met: each on a machine of its own, as Open MPI
    and TMPDIR have it.
    """
    processes = []
    for rank in ("0", "1"):
        (short_path / rank).mkdir()
        own = {
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
            "OMPI_COMM_WORLD_RANK": rank,
            "PMIX_NAMESPACE": "mpi-1",
        }
        command = [
            HOLDFAST,
            "task",
            "--rendezvous",
            short_path / "shared",
            "--host",
            "127.0.0.1",
            *options,
        ]
        environment = os.environ | own | {"TMPDIR": str(short_path / rank)}
        processes.append(
            subprocess.Popen(
                [*command, "--", sys.executable, program("task_meeting")],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        yield [
            json.loads(process.stdout.readline() or "{}") for process in processes if process.stdout
        ]
    finally:
        for process in processes:
            process.communicate()


def test_a_job_over_several_machines_is_closed(short_path: Path) -> None:
    """Process 0 makes a token and certificates, and leaves them in a file for this user alone;
    nothing of them is in the programs. Once all have left, the file is gone, and the coordinator's
    folder.
    """
    with two_machines(short_path) as said:
        file = short_path / "shared" / f"{digest_of('mpi-1')}.1.json"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        published = json.loads(file.read_text())
        secrets = json.loads(published["HOLDFAST_JOB_SECRETS"])
        assert all(each["environment"]["HOLDFAST_COORDINATOR"].startswith("unix:") for each in said)
        for secret in (secrets["token"], secrets["key"], secrets["client_key"]):
            assert secret and secret not in json.dumps(said)
        with (
            pytest.raises(CoordinationError),
            StatusClient(published["coordinator"], timeout_s=1.0) as stranger,
        ):
            stranger.status()
        (folder,) = short_path.glob("0/holdfast-*/*/job-*")
        job = JobFolder(folder).job()
        assert job is not None
    assert wait_until_ended([job.pid])
    assert not folder.exists() and list((short_path / "shared").iterdir()) == []
    left = short_path.glob("*/holdfast-*/*/relay-*")
    assert not [*left], "it goes with the last process of a node"


def test_whose_relay_is_missing_is_named(
    tmp_path: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process of the same node starts it: that one is named, and not process 0."""
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    monkeypatch.setattr(task, "_RENDEZVOUS_S", 0.0)
    write_files(tmp_path, JobSecrets.create(["127.0.0.1"]).files_of_client())
    settings = task.TaskSettings(coordinator="127.0.0.1:1", secrets_dir=tmp_path)
    with pytest.raises(StartupTimeout, match="process 2 has not published the relay of this node"):
        task.run_task(["true"], SLURM | {"SLURM_GTIDS": "2,3"}, settings)
    # That of a node whose processes were all killed goes with the next start, whether or not
    # somebody has waited for it.
    folder = user_folder()
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    for number, pid in enumerate((1 << 22, zombie.pid)):
        left = json.dumps({"relay": "unix:/x", "pid": pid})
        write_files(folder, {f"relay-old.{number}.n": left})
    given = ("--coordinator", "127.0.0.1:1", "--secrets", str(tmp_path))
    options = (*given, "--job-id", "a/b", "--", "true")
    alone = SLURM | {"SLURM_GTIDS": "3", "SLURM_LOCALID": "0"}
    done = run_task(*options, **alone, TMPDIR=str(short_path))
    assert (done.returncode, [*folder.glob("relay-*")]) == (0, []), done.stderr
    zombie.wait(30)


@pytest.mark.slow
def test_a_job_is_open_where_asked_for(short_path: Path) -> None:
    """--insecure: the processes reach the coordinator as anybody does."""
    with two_machines(short_path, "--insecure") as said:
        (address,) = {each["environment"]["HOLDFAST_COORDINATOR"] for each in said}
        with StatusClient(address) as anybody:
            assert anybody.status().num_processes == 2


@pytest.mark.parametrize(
    ("mode", "owner"),
    [
        (0o644, os.getuid()),
        pytest.param(0o622, os.getuid(), marks=pytest.mark.slow),
        pytest.param(0o600, 65534, marks=pytest.mark.slow),
    ],
)
def test_an_address_open_to_others_is_refused(short_path: Path, mode: int, owner: int) -> None:
    """It could be a coordinator of theirs, or be read by them."""
    if owner != os.getuid() and os.getuid() != 0:
        pytest.skip("only root can give a file away")
    file = short_path / f"{digest_of('mpi-1')}.1.json"
    write_files(short_path, {file.name: '{"coordinator": "evil:1"}'})
    file.chmod(mode)
    os.chown(file, owner, -1)
    own = {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "OMPI_COMM_WORLD_RANK": "1",
        "PMIX_NAMESPACE": "mpi-1",
    }
    done = run_task("--rendezvous", str(short_path), "--", "true", **own)
    found = (
        f"found mode {mode:04o} of user {owner}; remove it, or give --rendezvous a folder of this"
        " user's alone"
    )
    assert done.returncode == 1 and found in done.stderr, done.stderr


def test_secrets_are_of_a_coordinator_that_runs(tmp_path: Path) -> None:
    """With --secrets goes --coordinator."""
    made = JobSecrets.create(["127.0.0.1"])
    write_files(
        tmp_path,
        {
            "token": made.token,
            "ca.crt": made.ca,
            "client.crt": made.client_cert,
            "client.key": made.client_key,
            "key": made.key,
        },
    )
    done = run_task(
        "--secrets", str(tmp_path), "--rendezvous", str(tmp_path), "--", "true", **OPENMPI_5
    )
    assert (
        done.returncode == 1
        and "--secrets are those of a coordinator that runs: give its address" in done.stderr
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mpiexec", "machines"), [("mpiexec.openmpi", 1), ("mpiexec.mpich", 1), ("mpiexec.mpich", 2)]
)
def test_mpiexec_runs_a_job(tmp_path: Path, mpiexec: str, machines: int) -> None:
    """Three processes of a real mpiexec find each other, at one coordinator that process 0
    started; with a process manager for each of two machines (here: of two names) in a folder.
    """
    if shutil.which(mpiexec) is None:
        pytest.skip(f"{mpiexec} is not installed: scripts/install_system_packages.sh")
    options = []
    if mpiexec == "mpiexec.openmpi":
        root = ["--allow-run-as-root"] if os.getuid() == 0 else []
        options = [*root, "--oversubscribe"]
    task = []
    if machines == 2:
        options = ["-launcher", "fork", "-hosts", "localhost,127.0.0.1"]
        task = ["--insecure", "--rendezvous", str(tmp_path / "meeting")]
    command = [
        mpiexec,
        *options,
        "-n",
        "3",
        str(HOLDFAST),
        "task",
        *task,
        "--",
        sys.executable,
        str(program("mpirun_job")),
        str(tmp_path),
    ]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert [words[:3] for words in said] == [["0", "3", "2"], ["1", "3", "2"], ["2", "3", "2"]]
    assert len({words[3] for words in said}) == 1
