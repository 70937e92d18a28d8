"""What runs inside Ray's actors: one process of the job as a child, the relay of a machine, or the
coordinators.

The process is a child of the actor, not the actor itself: its environment is complete before it
imports jax, its signals are its own (Ray's worker handles SIGTERM by leaving), and on Linux the
kernel ends it when the actor dies.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from holdfast.coordination import Relay
from holdfast.coordination.address import address_towards
from holdfast.coordination.deadline import Deadline
from holdfast.coordination.process.diagnose import place_of
from holdfast.coordination.process.job_folder import keep_from_cleaners
from holdfast.multihost import ProcessSpec

from ...workers.coordinator import Coordinator, Coordinators
from ...workers.environment import worker_env
from ...workers.process import CALL_RUNNER, WorkerProcess
from ...workers.secrets import JobSecrets, spawn_relay
from ...workers.standby import NO_STANDBYS, StandbySettings, standbys_of
from .cluster import load_ray

_END_S = 10.0  # for a process that was killed
_MORE_LINES_S = 0.02  # lines that come so soon after another go with it
_MOST_LINES = 1_000  # of an update
_SHORTEST_WAIT_S = 0.001


@dataclass(frozen=True)
class Program:
    """What the processes of a job run: a command, or a pickled call."""

    command: Sequence[str] = ()
    call: bytes | None = None
    env: Mapping[str, str] = field(default_factory=dict)  # beside that of Ray's workers


@dataclass(frozen=True)
class WorkerUpdate:
    """What an actor reports of its process."""

    lines: tuple[str, ...]  # of its output
    code: int | None = None  # its exit code, at the end
    outcome: bytes | None = None  # of a call, pickled; at the end
    warmed: bool = False  # what `warm` has begun is done, well or not


class WorkerActor:
    """Holds one process of the job, in each of the attempts that run in the same place, and a
    standby for the next.

    Its methods are called one after the other, on the thread that ends with the actor. None blocks
    for longer than its timeout, or a few seconds for what an earlier attempt has left to end.
    """

    def __init__(self, folder: str = "") -> None:
        """The processes run in `folder`; where this machine has none, where Ray's workers do."""
        with contextlib.suppress(OSError):
            os.chdir(folder)
        self._updates: queue.SimpleQueue[str | int] = queue.SimpleQueue()  # lines, then the code
        self._process: WorkerProcess | None = None
        self._prepared: tuple[list[str], dict[str, str], int] | None = None
        self._standbys = NO_STANDBYS
        self._warms = False
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-")
        keep_from_cleaners(Path(self._folder.name))

    def pid(self) -> int:
        """Returns the actor's process id, once the actor is there."""
        return os.getpid()

    def place(self, process: int, pid: int) -> str:
        """Returns where a process of this machine is in its own code, "" where that cannot be seen.

        Blocks for at most 6 s.
        """
        return place_of(process, pid)

    def prepare(self, program: Program, spec: ProcessSpec) -> list[str]:
        """Notes what is to be started.

        Returns one line for each stale MEGASCALE_* value that was replaced.
        """
        env, lines = worker_env({**os.environ, **program.env}, spec, decides=True)
        command = list(program.command)
        if program.call is not None:
            path = Path(self._folder.name) / "call"
            path.write_bytes(program.call)
            command = [sys.executable, str(CALL_RUNNER), str(path), str(self._result)]
            env["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
        self._prepared = command, env, spec.process_id
        return lines

    def start(self, program: Program, spec: ProcessSpec) -> list[str]:
        """Starts what `prepare` notes, in the standby where there is one; returns its lines."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_END_S)
        # What the process before may still say goes to its own queue: what it has said is told, but
        # for its exit code.
        updates: queue.SimpleQueue[str | int] = queue.SimpleQueue()
        while not self._updates.empty():
            if isinstance(said := self._updates.get(), str):
                updates.put(said)
        self._updates = updates
        self._result.unlink(missing_ok=True)
        lines = self.prepare(program, spec)
        assert self._prepared is not None
        command, env, process = self._prepared
        self._process = self._standbys.take(
            process, env, updates.put, updates.put
        ) or WorkerProcess(command, env, on_line=updates.put, on_exit=updates.put)
        return lines

    def warm(self, settings: StandbySettings, *, restarts: bool) -> None:
        """Has a standby for what was prepared begin, where it is wanted and there is none; `poll`
        tells when it is ready.
        """
        assert self._prepared is not None
        command, env, process = self._prepared
        if self._standbys is NO_STANDBYS:
            if str(CALL_RUNNER) in command:  # what it imports first changes sys.path
                settings = replace(settings, preload=["ray.cloudpickle", *settings.preload])
            self._standbys = standbys_of(
                command,
                env,
                settings,
                cwd=None,
                restarts=restarts,
                say=lambda line: self._updates.put(f"holdfast: {line}"),
            )
        self._standbys.warm({process: env})
        self._warms = True

    def _has_warmed(self) -> bool:
        """Says, once, that the standby is ready, or never will be."""
        done = self._warms and not self._standbys.imports
        self._warms = self._warms and not done
        return done

    @property
    def _result(self) -> Path:
        return Path(self._folder.name) / "result"

    def poll(self, timeout_s: float) -> WorkerUpdate:
        """Returns what has happened since the last call; waits for the first of it."""
        lines: list[str] = []
        deadline = Deadline(timeout_s)
        wait_s = max(timeout_s, _SHORTEST_WAIT_S)
        # Of a process that prints on and on the other calls would wait for ever.
        while wait_s and len(lines) < _MOST_LINES:
            try:
                item = self._updates.get(timeout=wait_s)
            except queue.Empty:
                break
            if isinstance(item, int):
                outcome = self._result.read_bytes() if self._result.exists() else None
                return WorkerUpdate(tuple(lines), item, outcome)
            lines.append(item)
            wait_s = min(_MORE_LINES_S, deadline.remaining_s())
        return WorkerUpdate(tuple(lines), warmed=self._has_warmed())

    def signal(self, number: int) -> None:
        """Sends a signal to the process."""
        if self._process is not None:
            self._process.signal(number)

    def kill(self) -> None:
        """Ends the process and all that it started, now."""
        if self._process is not None:
            self._process.kill()


class HostActor:
    """Holds the relay of a machine, through the attempts of a job."""

    def __init__(self) -> None:
        self._relay: Relay | None = None
        self._secrets: JobSecrets | None = None

    def pid(self) -> int:
        """Returns the actor's process id, once the actor is there."""
        return os.getpid()

    def serve(
        self, attempt: int, coordinator: str, secrets: JobSecrets, process_ids: Sequence[int]
    ) -> tuple[str, str]:
        """Has the relay serve an attempt, for more processes where it does so already.

        Returns its address for that attempt, and the machine's for its peers.
        """
        name = str(attempt)
        if self._relay is not None and self._relay.runs and secrets == self._secrets:
            address = self._relay.serve(name, coordinator, process_ids)
        else:
            self._close_relay()
            self._relay = spawn_relay(coordinator, secrets, process_ids, name=name)
            self._secrets = secrets
            address = self._relay.address
        return address, address_towards(coordinator)

    def close(self, attempt: int) -> None:
        """Closes what an attempt has had for itself."""
        if self._relay is not None:
            self._relay.end(str(attempt))

    def _close_relay(self) -> None:
        if self._relay is not None:
            self._relay.close()
            self._relay = None


class CoordinatorActor:
    """Holds the coordinators of attempts that processes outlive: they share their secrets."""

    def __init__(self, job_id: str, heartbeat_timeout_s: float, secured: bool) -> None:
        self._job_id = job_id
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._host = load_ray().util.get_node_ip_address()
        self._secrets = JobSecrets.create([self._host]) if secured else None
        self._coordinators = Coordinators(self._start)
        self._opened: dict[int, Coordinator] = {}

    def _start(self, attempt: int, num_processes: int) -> Coordinator:
        return Coordinator(
            self._job_id,
            attempt,
            num_processes,
            host=self._host,
            heartbeat_timeout_s=self._heartbeat_timeout_s,
            secrets=self._secrets,
        )

    def prepare(self, attempt: int, num_processes: int) -> None:
        """Starts the coordinator of an attempt that may come."""
        self._coordinators.prepare(attempt, num_processes)

    def open(self, attempt: int, num_processes: int) -> tuple[str, JobSecrets | None]:
        """Starts the coordinator of an attempt, where it is not there; returns its HOST:PORT, and
        what its callers show.
        """
        coordinator = self._coordinators.open(attempt, num_processes)
        self._opened[attempt] = coordinator
        return coordinator.address, self._secrets

    def close(self, attempt: int) -> None:
        """Ends the coordinator of an attempt."""
        if coordinator := self._opened.pop(attempt, None):
            coordinator.close()
