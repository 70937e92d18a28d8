"""What runs inside Ray's actors: one process of the job as a child, or the coordinator.

The process is a child of the actor, not the actor itself: its environment is complete before it
imports jax, its signals are its own (Ray's worker handles SIGTERM by leaving), and on Linux the
kernel ends it when the actor dies.
"""

from __future__ import annotations

import os
import queue
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.coordination import Relay
from holdfast.coordination.address import address_towards
from holdfast.coordination.process.job_folder import keep_from_cleaners
from holdfast.multihost import ProcessSpec

from ...workers.coordinator import Coordinator, report_exit
from ...workers.environment import worker_env
from ...workers.process import CALL_RUNNER, WorkerProcess
from ...workers.secrets import JobSecrets, spawn_relay
from .cluster import load_ray

_END_S = 10.0  # for a process that was killed
_MORE_LINES_S = 0.02  # lines that come so soon after another go with it
_SHORTEST_WAIT_S = 0.001


@dataclass(frozen=True)
class WorkerUpdate:
    """What an actor reports of its process."""

    lines: tuple[str, ...]  # of its output
    code: int | None = None  # its exit code, at the end
    outcome: bytes | None = None  # of a call, pickled; at the end


class WorkerActor:
    """Holds one process of the job, in each of the attempts that run in the same place.

    Its methods are called one after the other. None blocks for longer than its timeout, or a few
    seconds for what an earlier attempt has left to end.
    """

    def __init__(self) -> None:
        self._updates: queue.SimpleQueue[str | int] = queue.SimpleQueue()  # lines, then the code
        self._process: WorkerProcess | None = None
        self._relay: Relay | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-")
        keep_from_cleaners(Path(self._folder.name))

    def pid(self) -> int:
        """Returns the actor's process id, once the actor is there."""
        return os.getpid()

    def start_relay(
        self, coordinator: str, secrets: JobSecrets, process_ids: Sequence[int]
    ) -> tuple[str, str]:
        """Starts the relay of this machine, which ends with this actor.

        Returns the relay's address, and the machine's for its peers.
        """
        self._close_relay()
        self._relay = spawn_relay(coordinator, secrets, process_ids)
        return self._relay.address, address_towards(coordinator)

    def start(
        self,
        command: Sequence[str] | None,
        call: bytes | None,
        spec: ProcessSpec,
        extra: Mapping[str, str],
    ) -> list[str]:
        """Starts the command, or the pickled call.

        Returns one line for each stale MEGASCALE_* value that was replaced.
        """
        if self._process is not None:
            self._process.kill()
            self._process.wait(_END_S)
        # What the process before may still say goes to its own queue.
        updates: queue.SimpleQueue[str | int] = queue.SimpleQueue()
        self._updates = updates
        self._result.unlink(missing_ok=True)
        env, lines = worker_env({**os.environ, **extra}, spec)
        if call is not None:
            path = Path(self._folder.name) / "call"
            path.write_bytes(call)
            command = [sys.executable, str(CALL_RUNNER), str(path), str(self._result)]
            env["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
        assert command is not None

        def on_exit(code: int) -> None:
            report_exit(spec.coordinator, spec.process_id, code)
            updates.put(code)

        self._process = WorkerProcess(command, env, on_line=updates.put, on_exit=on_exit)
        return lines

    def _close_relay(self) -> None:
        if self._relay is not None:
            self._relay.close()
            self._relay = None

    @property
    def _result(self) -> Path:
        return Path(self._folder.name) / "result"

    def poll(self, timeout_s: float) -> WorkerUpdate:
        """Returns what has happened since the last call; waits for the first of it."""
        lines: list[str] = []
        wait_s = timeout_s
        while True:
            try:
                item = self._updates.get(timeout=max(wait_s, _SHORTEST_WAIT_S))
            except queue.Empty:
                return WorkerUpdate(tuple(lines))
            if isinstance(item, int):
                outcome = self._result.read_bytes() if self._result.exists() else None
                return WorkerUpdate(tuple(lines), item, outcome)
            lines.append(item)
            wait_s = _MORE_LINES_S

    def signal(self, number: int) -> None:
        """Sends a signal to the process."""
        if self._process is not None:
            self._process.signal(number)

    def kill(self) -> None:
        """Ends the process and all that it started, now."""
        if self._process is not None:
            self._process.kill()


class CoordinatorActor:
    """Holds the coordinator of one attempt."""

    def __init__(
        self,
        job_id: str,
        attempt: int,
        num_processes: int,
        heartbeat_timeout_s: float,
        secured: bool,
    ) -> None:
        host = load_ray().util.get_node_ip_address()
        self._coordinator = Coordinator(
            job_id,
            attempt,
            num_processes,
            host=host,
            heartbeat_timeout_s=heartbeat_timeout_s,
            secured=secured,
        )

    def endpoint(self) -> tuple[str, JobSecrets | None]:
        """Returns the coordinator's HOST:PORT, and what its callers show."""
        return self._coordinator.address, self._coordinator.secrets

    def close(self) -> None:
        """Ends the coordinator."""
        self._coordinator.close()
