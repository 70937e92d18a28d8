"""`holdfast task`: one process of a job that Slurm, mpirun or Kubernetes started, with a
ProcessSpec in its environment.

The command is a child, with the launcher's signals passed on: its end, however it comes, is
reported to the coordinator at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.coordination import CoordinationError, Credentials, StatusClient
from holdfast.coordination.process.job_folder import JobFolder, user_folder
from holdfast.multihost import ProcessSpec, StartupFailed, StartupTimeout
from holdfast.multihost.group.runtime import address_towards

from ..workers.coordinator import Coordinator, report_exit
from ..workers.environment import worker_env
from ..workers.process import WorkerProcess
from ..workers.secrets import (
    JobSecrets,
    credentials_in,
    require_cryptography,
    spawn_relay,
    write_files,
)
from ..workers.signals import passing_on
from .detect import ClusterEnv, detect

MARK = "\x1eholdfast "
"""Begins a line that reports to the Slurm engine: `started STEP` or `exited CODE`."""

_RENDEZVOUS_S = 300.0
_POLL_S = 0.05
_STATUS_TIMEOUT_S = 5.0


def run_task(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    coordinator: str | None = None,
    host: str | None = None,
    rendezvous: Path | None = None,
    job_id: str | None = None,
    attempt: int | None = None,
    report: bool = False,
    secrets_dir: Path | None = None,
    insecure: bool = False,
) -> int:
    """Runs `command` as the process that the launcher's environment says this is, and returns its
    exit code (128 + a signal's number).

    The coordinator is at `coordinator`; without one, process 0 starts it. Where all processes are
    on this machine, it listens at a Unix socket. Elsewhere at `host` (default: the name of process
    0's machine), and the others find its address in the folder `rendezvous`, which all must see,
    with a token and certificates that are made for this job, in a file that only this user can
    read; unless `insecure`. `secrets_dir` holds those of the coordinator at `coordinator` (or srun
    has handed them on). With them the processes of a node share a relay. Raises ValueError where no
    launcher is found, StartupTimeout where no address appears, StartupFailed where another user
    could have written it, ImportError where certificates cannot be made.
    """
    try:
        spec, env = _prepare(
            environment, coordinator, host, rendezvous, job_id, attempt, secrets_dir, insecure
        )
    except BaseException:
        if report:
            print(f"{MARK}exited 1", flush=True)
        raise
    step = env.get("SLURM_STEP_ID", "")
    if report:
        print(f"{MARK}started {step}", flush=True)
    detected = detect(environment)
    code = _run(command, env, passes_on=detected is not None and detected.launcher != "Slurm")
    report_exit(spec.coordinator, spec.process_id, code)
    if report:
        print(f"{MARK}exited {code}", flush=True)
    return code if code >= 0 else 128 - code


def _prepare(
    environment: Mapping[str, str],
    coordinator: str | None,
    host: str | None,
    rendezvous: Path | None,
    job_id: str | None,
    attempt: int | None,
    secrets_dir: Path | None,
    insecure: bool,
) -> tuple[ProcessSpec, dict[str, str]]:
    """Returns who this process is, and the environment of its command, once there is a
    coordinator.
    """
    detected = detect(environment)
    if detected is None:
        raise ValueError(
            "no launcher is found: expected the environment of srun, mpirun, or a Kubernetes"
            " Indexed Job (see docs/engines-*.md)"
        )
    job = job_id or detected.job_id
    number = detected.attempt if attempt is None else attempt
    environment = dict(environment)
    secrets = (
        JobSecrets.take_from_env(environment)
        if secrets_dir is None
        else JobSecrets.from_folder(secrets_dir)
    )
    address = coordinator
    if address is None:
        if secrets is not None:
            raise ValueError(
                "--secrets are those of a coordinator that runs: give its address, --coordinator"
                " HOST:PORT"
            )
        address, secrets = _rendezvous(detected, job, number, host, rendezvous, insecure)
    own_address = None
    if secrets is not None:
        own_address, address = (
            address_towards(address),
            _relay(detected, address, f"{job}.{number}", secrets),
        )
    spec = ProcessSpec(
        job_id=job,
        attempt=number,
        process_id=detected.process_id,
        num_processes=detected.num_processes,
        coordinator=address,
        slice_id=detected.slice_id,
        num_slices=detected.num_slices,
        slice_address=(detected.first_host or None) if detected.num_slices > 1 else None,
        local_rank=detected.local_rank,
        host_address=own_address,
    )
    env, lines = worker_env(environment, spec, share_of=detected.local_size)
    for line in lines:
        print(f"holdfast: {line}", file=sys.stderr, flush=True)
    return spec, env


def _rendezvous(
    detected: ClusterEnv,
    job: str,
    attempt: int,
    host: str | None,
    rendezvous: Path | None,
    insecure: bool,
) -> tuple[str, JobSecrets | None]:
    """Returns where the coordinator is, which process 0 starts, and what it wants to see."""
    one_machine = detected.local_size == detected.num_processes
    if rendezvous is None and not one_machine:
        raise ValueError(
            f"{detected.launcher} runs this job on several machines: give --coordinator HOST:PORT,"
            " or --rendezvous with a shared folder"
        )
    secured = not insecure and not (one_machine and host is None)
    if secured:
        require_cryptography()  # in all, not to wait for a process 0 that cannot go on
    folder = user_folder(create=True) if rendezvous is None else rendezvous
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{job}.{attempt}.json"
    if detected.process_id == 0:
        host = host or (None if one_machine else socket.gethostname())
        coordinator = Coordinator(
            job, attempt, detected.num_processes, host=host, outlives_us=True, secured=secured
        )
        shown = {} if coordinator.secrets is None else coordinator.secrets.to_env()
        _publish(path, {"coordinator": coordinator.address} | shown)
        return coordinator.address, coordinator.secrets
    found = _wait_for(path, _gathers)
    return str(found["coordinator"]), JobSecrets.take_from_env(found)


def _publish(path: Path, value: dict[str, Any]) -> None:
    """Writes a file that only its owner can read, all at once."""
    whole = path.with_name(f"{path.name}.{os.getpid()}")
    whole.unlink(missing_ok=True)
    write_files(whole.parent, {whole.name: json.dumps(value)})
    whole.replace(path)


def _relay(detected: ClusterEnv, coordinator: str, name: str, secrets: JobSecrets) -> str:
    """Returns the address of this node's relay, which the first of the node's processes starts, and
    which ends with the last.
    """
    path = user_folder(create=True) / f"relay-{name}.{detected.node or detected.process_id}"
    if detected.process_id == detected.on_node[0]:
        relay = spawn_relay(coordinator, secrets, detected.on_node)
        _publish(path, {"relay": relay.address, "pid": relay.pid})
        found: dict[str, Any] = {"relay": relay.address, "pid": relay.pid}
    else:
        found = _wait_for(path, lambda found: Path(f"/proc/{found['pid']}").exists())
    os.open(
        f"/proc/{found['pid']}/fd/0", os.O_WRONLY
    )  # it ends when nobody holds the other end of its input any more: this process does
    return str(found["relay"])


def _wait_for(path: Path, of_this_run: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Returns what another process has published: an earlier run of the same id may have, too."""
    deadline = time.monotonic() + _RENDEZVOUS_S
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            found = _read(path)
            if of_this_run(found):
                return found
        time.sleep(_POLL_S)
    raise StartupTimeout(
        f"process 0 has not published a coordinator in {path} within {_RENDEZVOUS_S:g} s",
        timeout_s=_RENDEZVOUS_S,
        knob="--rendezvous",
    )


def _read(path: Path) -> dict[str, Any]:
    """Reads what this user has published. What others can write may lead to a coordinator of
    theirs, what they can read is no secret.
    """
    with path.open() as file:
        about = os.fstat(file.fileno())
        others = (
            about.st_mode & (stat.S_IRWXG | stat.S_IRWXO) and path.parent != user_folder()
        )  # which nobody else can enter
        if about.st_uid != os.getuid() or others:
            raise StartupFailed(
                f"{path}: expected a file that only user {os.getuid()} can read, found mode"
                f" {stat.S_IMODE(about.st_mode):04o} of user {about.st_uid}; remove it, or give"
                " --rendezvous a folder of this user's alone"
            )
        found: dict[str, Any] = json.load(file)
    return found


def _gathers(found: dict[str, Any]) -> bool:
    """Returns whether a coordinator still waits for processes: one that does not is of an earlier
    run.
    """
    secrets = JobSecrets.take_from_env(dict(found))
    with contextlib.ExitStack() as undone:
        credentials = Credentials()
        if secrets is not None:
            folder = JobFolder.create()
            undone.callback(folder.remove)
            credentials = credentials_in(folder, secrets)
        try:
            client = undone.enter_context(
                StatusClient(found["coordinator"], credentials, timeout_s=_STATUS_TIMEOUT_S)
            )
            return client.status().phase == "gathering"
        except CoordinationError:
            return False


def _run(command: Sequence[str], env: Mapping[str, str], *, passes_on: bool) -> int:
    """Runs the command to its end, and passes signals on to it. A step of Slurm's gets none from
    here: it is signalled as a whole.
    """
    happened: queue.SimpleQueue[tuple[bool, int]] = (
        queue.SimpleQueue()
    )  # (ended?, exit code or signal)
    with passing_on(lambda number: happened.put((False, number)), signal.SIGUSR1, signal.SIGUSR2):
        process = WorkerProcess(
            command, env, on_line=None, on_exit=lambda code: happened.put((True, code))
        )
        while not (item := happened.get())[0]:
            if passes_on:
                process.signal(item[1])
    return item[1]
