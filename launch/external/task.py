"""`holdfast task`: one process of a job that Slurm, mpirun or Kubernetes started.

The process gets a ProcessSpec in its environment. It is a child, and the launcher's signals are
passed on to it. Its end, however it comes, is reported to the coordinator at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.coordination import CoordinationError, Relay, StatusClient
from holdfast.coordination.address import address_towards, own_host
from holdfast.coordination.mounts import birth_of
from holdfast.coordination.process.job_folder import digest_of, user_folder
from holdfast.multihost import ProcessSpec, StartupFailed, StartupTimeout
from holdfast.multihost.start.launchers import ClusterEnv, detect

from ..workers.coordinator import Coordinator, report_exit
from ..workers.environment import worker_env
from ..workers.process import OomKills, WorkerProcess
from ..workers.raised import Grace, RaisedWatch
from ..workers.secrets import (
    JobSecrets,
    require_cryptography,
    shown,
    spawn_relay,
    write_files,
)
from ..workers.signals import passing_on

MARK = "\x1eholdfast "
"""Begins a line that reports to the Slurm engine: `started STEP NODE` or `exited CODE`."""
ALL = "all"
"""Stands for every process in an order of that engine: see `_obey`."""

_RENDEZVOUS_S = 300.0
_POLL_S = 0.05
_STATUS_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """What a task is told besides its launcher's environment.

    Without `coordinator`, process 0 starts one. Where all processes are on this machine, that one
    listens at a Unix socket. Elsewhere it listens at `host`, and the others find its address in
    the folder `rendezvous`. There lie, unless `insecure`, a token and certificates that are made
    for this job, in a file that only this user can read.
    """

    coordinator: str | None = None  # HOST:PORT
    host: str | None = None  # None: the name of process 0's machine, or its address
    rendezvous: Path | None = None  # all processes must see it
    job_id: str | None = None  # None: the launcher's
    attempt: int | None = None  # None: the launcher's
    secrets_dir: Path | None = None  # of the coordinator at `coordinator`; None: srun hands them on
    insecure: bool = False
    # For a process that an exception ends, and that a thread or an exit hook keeps; after a save of
    # it that can still be committed.
    grace_s: float = 5.0
    commit_grace_s: float = 600.0


def run_task(
    command: Sequence[str],
    environment: Mapping[str, str],
    settings: TaskSettings,
    *,
    report: bool = False,
) -> int:
    """Runs `command` as the process that the launcher's environment says this is.

    Returns its exit code (128 + a signal's number). With secrets, the processes of a node share a
    relay. With `report`, marked lines say how it ended.

    Raises ValueError where no launcher is found, StartupTimeout where no address appears,
    StartupFailed where another user could have written it, ImportError where certificates cannot be
    made.
    """
    with contextlib.ExitStack() as stack:
        try:
            detected = _detect(environment)
            spec, env, relay = _prepare(detected, environment, settings, stack, decides=report)
        except BaseException:
            if report:
                print(f"{MARK}exited 1", flush=True)
            raise
        passes_on = detected.launcher != "Slurm"
        if report:  # the engine of `holdfast slurm` watches all tasks of its job
            code = _run(command, env, spec, passes_on=passes_on, relay=relay)
        else:
            grace = Grace(settings.grace_s, settings.commit_grace_s)
            code = _run(command, env, spec, passes_on=passes_on, grace=grace)
            report_exit(spec.coordinator, spec.process_id, code)
    if report:
        print(f"{MARK}exited {code}", flush=True)
    return code if code >= 0 else 128 - code


def _detect(environment: Mapping[str, str]) -> ClusterEnv:
    detected = detect(environment)
    if detected is None:
        raise ValueError(
            "no launcher is found: expected the environment of srun, mpiexec, or a Kubernetes"
            " Indexed Job (see docs/running-jobs.md)"
        )
    return detected


def _prepare(
    detected: ClusterEnv,
    environment: Mapping[str, str],
    settings: TaskSettings,
    stack: contextlib.ExitStack,
    *,
    decides: bool,
) -> tuple[ProcessSpec, dict[str, str], int | None]:
    """Returns who this process is, and its command's environment, once a coordinator is there.

    Beside them, the descriptor of its relay's input. `stack` lives as long as the process.
    """
    detected = replace(
        detected,
        job_id=settings.job_id or detected.job_id,
        attempt=settings.attempt or detected.attempt,
    )
    environment = dict(environment)
    if settings.secrets_dir is None:
        secrets = JobSecrets.take_from_env(environment)
    else:
        secrets = JobSecrets.from_folder(settings.secrets_dir)
    address = settings.coordinator
    if address is None:
        if secrets is not None:
            raise ValueError(
                "--secrets are those of a coordinator that runs: give its address, --coordinator"
                " HOST:PORT"
            )
        address, secrets = _rendezvous(detected, settings)
    host_address = None
    relay = None
    if secrets is not None:
        host_address = address_towards(address)
        address, relay = _relay(detected, address, secrets, stack)
    spec = ProcessSpec(
        job_id=detected.job_id,
        attempt=detected.attempt,
        process_id=detected.process_id,
        num_processes=detected.num_processes,
        coordinator=address,
        slice_id=detected.slice_id,
        num_slices=detected.num_slices,
        slice_address=(detected.first_host or None) if detected.num_slices > 1 else None,
        local_rank=detected.local_rank,
        local_count=detected.local_size or None,
        host_address=host_address,
    )
    env, lines = worker_env(environment, spec, share_of=detected.local_size, decides=decides)
    for line in lines:
        print(f"holdfast: {line}", file=sys.stderr, flush=True)
    return spec, env, relay


def _rendezvous(detected: ClusterEnv, settings: TaskSettings) -> tuple[str, JobSecrets | None]:
    """Returns where the coordinator is, which process 0 starts, and what it wants to see."""
    if settings.rendezvous is None and not detected.on_one_machine:
        raise ValueError(
            f"{detected.launcher} runs this job on several machines: give --coordinator HOST:PORT,"
            " or --rendezvous with a shared folder"
        )
    at_socket = detected.on_one_machine and settings.host is None
    secured = not settings.insecure and not at_socket
    if secured:
        require_cryptography()  # in all, not to wait for a process 0 that cannot go on
    folder = settings.rendezvous or user_folder(create=True)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{digest_of(detected.job_id)}.{detected.attempt}.json"
    if detected.process_id != 0:
        published = _wait_for(path, _gathers, "process 0 has not published a coordinator")
        return str(published["coordinator"]), JobSecrets.take_from_env(published)
    host = None if at_socket else settings.host or own_host()
    coordinator = Coordinator(
        detected.job_id,
        detected.attempt,
        detected.num_processes,
        host=host,
        published=path.absolute(),
        secrets=JobSecrets.create([host]) if secured and host else None,
    )
    secrets = {} if coordinator.secrets is None else coordinator.secrets.to_env()
    _publish(path, {"coordinator": coordinator.address} | secrets)
    return coordinator.address, coordinator.secrets


def _publish(path: Path, value: dict[str, Any]) -> None:
    """Writes a file that only its owner can read, all at once."""
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    whole.unlink(missing_ok=True)
    write_files(whole.parent, {whole.name: json.dumps(value)})
    whole.replace(path)


def _relay(
    detected: ClusterEnv, coordinator: str, secrets: JobSecrets, stack: contextlib.ExitStack
) -> tuple[str, int]:
    """Returns the address of this node's relay, and a descriptor of its input.

    The first of the node's processes starts the relay. It ends with the last, and so does the file
    that says where it is.
    """
    folder = user_folder(create=True)
    first = detected.on_node[0]
    path = folder / f"relay-{digest_of(detected.job_id)}.{detected.attempt}.{first}"
    with contextlib.ExitStack() as held:
        if detected.process_id == first:
            _remove_left(folder)
            name = str(detected.attempt)
            relay = spawn_relay(coordinator, secrets, detected.on_node, name=name)
            held.callback(relay.abandon)
            published: dict[str, Any] = {"relay": relay.address, "pid": relay.pid}
            _publish(path, published)
        else:
            missing = f"process {first} has not published the relay of this node"
            published = _wait_for(path, _relays, missing)
        stack.enter_context(_in_use(path))
        # The relay ends when nobody holds the other end of its input any more: this process does.
        orders = os.open(f"/proc/{published['pid']}/fd/0", os.O_WRONLY)
    return str(published["relay"]), orders


def _relays(published: dict[str, Any]) -> bool:
    return birth_of(published["pid"]) != ""


def _remove_left(folder: Path) -> None:
    """Removes what says where relays are that have ended: their last process was killed."""
    for path in folder.glob("relay-*"):
        with contextlib.suppress(FileNotFoundError):  # removed beside this look
            if not _relays(_read(path)):
                path.unlink()


@contextlib.contextmanager
def _in_use(path: Path) -> Iterator[None]:
    """Locks a file beside others that use it; the last of them removes it."""
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def _wait_for(
    path: Path, of_this_run: Callable[[dict[str, Any]], bool], missing: str
) -> dict[str, Any]:
    """Returns what another process has published; `missing` says what, where it has not."""
    deadline = time.monotonic() + _RENDEZVOUS_S
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            published = _read(path)
            # An earlier run of the same id may have left a file of that name.
            if of_this_run(published):
                return published
        time.sleep(_POLL_S)
    raise StartupTimeout(
        f"{missing} in {path} within {_RENDEZVOUS_S:g} s",
        timeout_s=_RENDEZVOUS_S,
        knob="--rendezvous",
    )


def _read(path: Path) -> dict[str, Any]:
    """Reads what this user has published.

    What others can write may lead to a coordinator of theirs. What others can read is no secret.
    """
    with path.open() as file:
        status = os.fstat(file.fileno())
        # Nobody else can enter the user's own folder.
        others = status.st_mode & (stat.S_IRWXG | stat.S_IRWXO) and path.parent != user_folder()
        if status.st_uid != os.getuid() or others:
            raise StartupFailed(
                f"{path}: expected a file that only user {os.getuid()} can read, found mode"
                f" {stat.S_IMODE(status.st_mode):04o} of user {status.st_uid}; remove it, or give"
                " --rendezvous a folder of this user's alone"
            )
        published: dict[str, Any] = json.load(file)
    return published


def _gathers(published: dict[str, Any]) -> bool:
    """Returns whether a coordinator still waits for processes; else it is of an earlier run."""
    address = published["coordinator"]
    with shown(JobSecrets.take_from_env(dict(published))) as credentials:
        try:
            with StatusClient(address, credentials, timeout_s=_STATUS_TIMEOUT_S) as client:
                return client.status().phase == "gathering"
        except CoordinationError:
            return False


def _run(
    command: Sequence[str],
    env: Mapping[str, str],
    spec: ProcessSpec,
    *,
    passes_on: bool,
    grace: Grace | None = None,
    relay: int | None = None,
) -> int:
    """Runs the command to its end.

    Passes signals on to it, but where a step of Slurm's gets them as a whole. With `grace` it ends
    a process that has raised and does not end; without, it reports to whoever does, and obeys.
    """
    signals: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # None: the command has ended
    codes: list[int] = []
    oom_kills = OomKills()

    def on_exit(code: int) -> None:
        if why := oom_kills.why(code):
            print(f"holdfast: {why}", file=sys.stderr, flush=True)
        codes.append(code)
        signals.put(None)

    def end(said: str) -> None:
        failed = f"process {spec.process_id} has failed, and does not end"
        print(f"holdfast: {failed}: {said}; ending it", file=sys.stderr, flush=True)
        process.kill()

    with contextlib.ExitStack() as stack:
        stack.enter_context(passing_on(signals.put, signal.SIGUSR1, signal.SIGUSR2))
        process = WorkerProcess(command, env, on_line=None, on_exit=on_exit)
        if grace is None:
            where = [env.get(name, "") for name in ("SLURM_STEP_ID", "SLURMD_NODENAME")]
            print(f"{MARK}started", *where, flush=True)
            threading.Thread(target=_obey, args=(process, spec, relay), daemon=True).start()
        watch = None
        if grace is not None:
            watch = RaisedWatch(spec.coordinator, spec.process_id, end, grace)
            stack.callback(watch.close)
        while (number := signals.get()) is not None:
            if passes_on:
                process.signal(number)
        return codes[0] if watch is None else watch.code(codes[0])


def _obey(process: WorkerProcess, spec: ProcessSpec, relay: int | None) -> None:
    """Does what the Slurm engine says by this process's input, which all tasks of a step share:
    `signal PROCESS NUMBER`, `serve ATTEMPT COORDINATOR`, and `close` for the attempts before it.
    """
    served = [str(spec.attempt)]
    with open(0, closefd=False) as orders:
        for line in orders:
            match line.split():
                case ["signal", who, number] if who in (ALL, str(spec.process_id)):
                    if int(number) == signal.SIGKILL:
                        process.kill()
                    else:
                        process.signal(int(number))
                case ["serve", attempt, coordinator] if relay is not None:
                    served.append(attempt)
                    os.write(relay, Relay.order(attempt, coordinator, [spec.process_id]))
                case ["close"] if relay is not None:
                    while len(served) > 1:
                        os.write(relay, Relay.order(served.pop(0)))
