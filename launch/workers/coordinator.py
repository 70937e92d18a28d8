"""The coordinator of one attempt, in a process of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.coordination import (
    CoordinationError,
    CoordinationService,
    Credentials,
    Endpoint,
    JobIdentity,
    ServiceTimeouts,
    StatusClient,
)
from holdfast.coordination.process.child import keep_exit_codes
from holdfast.coordination.process.job_folder import JobFolder, RunningJob
from holdfast.multihost import StartupFailed
from holdfast.proto import session_pb2

from .secrets import JobSecrets, credentials_in, server_arguments, write_files

HEARTBEAT_TIMEOUT_S = 60.0
"""Silence after which a process of a launched job is lost: for hosts that vanish.

The death of a process alone is known at once.
"""

_STARTUP_TIMEOUT_S = 3600.0
_LINGER_S = 10.0


def report_exit(address: str, process: int, code: int) -> None:
    """Reports the end of a process to the coordinator at `address`, or its relay, if it is there.

    Takes at most 1 s.
    """
    with contextlib.suppress(CoordinationError), StatusClient(address, timeout_s=1.0) as client:
        client.report_exit(process, code)


def end_attempt(address: str, credentials: Credentials, following: session_pb2.NextAttempt) -> None:
    """Says to those that outlive the attempt of a coordinator where the next one is; takes at most
    1 s.
    """
    with (
        contextlib.suppress(CoordinationError),
        StatusClient(address, credentials, timeout_s=1.0) as client,
    ):
        client.end_attempt(following.why, following)


class Coordinator:
    """The coordinator of one (job, attempt): at a free port of `host`, or at a Unix socket.

    The socket is of this user's alone. With `secrets`, which are made for `host`, callers show
    their certificates and their token. It ends with this process. With `published`, the file in
    which its address will be, it outlives this process, and removes that file and its folder when
    it ends. Raises StartupFailed, which no other attempt can mend, where it does not start.
    """

    def __init__(
        self,
        job_id: str,
        attempt: int,
        num_processes: int,
        *,
        host: str | None = None,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        log_file: Path | None = None,
        published: Path | None = None,
        secrets: JobSecrets | None = None,
    ) -> None:
        keep_exit_codes()
        self._job_id = job_id
        self._attempt = attempt
        self._closed = threading.Event()
        self.secrets = secrets
        self.credentials = Credentials()
        arguments: list[str] = []
        if log_file is not None:
            arguments.append(f"--log-file={log_file}")
        timeouts = ServiceTimeouts(
            heartbeat_s=heartbeat_timeout_s,
            linger_s=_LINGER_S,
            startup_s=0 if published is None else _STARTUP_TIMEOUT_S,
        )
        with _startup_failures(attempt), contextlib.ExitStack() as undone:
            self._folder = JobFolder.create()
            undone.callback(self._folder.remove)
            if published is None:
                arguments.append("--end-with-input")
            else:
                arguments += [f"--own-folder={self._folder.path}", f"--own-file={published}"]
            if secrets is not None:
                assert host is not None, "a socket needs no secrets"
                self.credentials = credentials_in(self._folder, secrets)
                write_files(self._folder.path, secrets.files_of_server())
                arguments += server_arguments(self._folder.path)
            self._service = CoordinationService.spawn(
                num_processes,
                job=JobIdentity(name=job_id, attempt=attempt),
                endpoint=Endpoint(host=host or self._folder.socket),
                timeouts=timeouts,
                recoverable=True,
                survivable=True,
                arguments=tuple(arguments),
            )
            undone.pop_all()
        try:
            self.publish()
        except StartupFailed:
            self.close()
            raise

    def publish(self, *, waiting: bool = False) -> None:
        """Has `holdfast status` find it, unless it is `waiting` for its attempt to begin.

        Raises StartupFailed where its folder takes no file.
        """
        job = RunningJob(self._job_id, self._attempt, self.address, self.pid, waiting=waiting)
        with _startup_failures(self._attempt):
            self._folder.publish(job)

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._service.runs

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._service.pid

    @property
    def address(self) -> str:
        """HOST:PORT, or unix:PATH."""
        return str(self._service.address)

    def on_end(self, report: Callable[[int], None]) -> None:
        """Calls `report` with the exit code, where the coordinator ends before `close`.

        The code is minus the signal's number. The call comes once, on a thread of its own.
        """

        def wait() -> None:
            code = self._service.wait(None)
            if not self._closed.is_set():
                report(code)

        threading.Thread(target=wait, name="holdfast-coordinator-end", daemon=True).start()

    def end_attempt(self, following: session_pb2.NextAttempt) -> None:
        """Says to those that outlive its attempt where the next one is; takes at most 1 s."""
        end_attempt(self.address, self.credentials, following)

    def close(self) -> None:
        """Ends it."""
        self._closed.set()
        self._service.close()
        self._folder.remove()


class Coordinators:
    """Starts the coordinators of attempts, one of them ahead: a start takes half a second."""

    def __init__(self, start: Callable[[int, int], Coordinator]) -> None:
        self._start = start
        self._ahead: dict[tuple[int, int], Coordinator] = {}

    def prepare(self, attempt: int, num_processes: int) -> None:
        """Starts that of an attempt that may come."""
        wanted = (attempt, num_processes)
        if wanted in self._ahead:
            return
        self.close()
        with contextlib.suppress(StartupFailed):  # the attempt will meet it again, and report it
            coordinator = self._start(*wanted)
            coordinator.publish(waiting=True)
            self._ahead[wanted] = coordinator

    def open(self, attempt: int, num_processes: int) -> Coordinator:
        """Returns that of an attempt that begins. Raises StartupFailed."""
        ahead = self._ahead.get((attempt, num_processes))
        if ahead is None or not ahead.runs:
            self.close()
            return self._start(attempt, num_processes)
        self._ahead.clear()
        ahead.publish()
        return ahead

    def close(self) -> None:
        """Ends the one that is ahead."""
        while self._ahead:
            self._ahead.popitem()[1].close()


@contextlib.contextmanager
def _startup_failures(attempt: int) -> Iterator[None]:
    try:
        yield
    except (CoordinationError, OSError, ImportError) as error:
        raise StartupFailed(f"the coordinator cannot start: {error}", attempt=attempt) from error
