"""Servers as processes of their own: a child that prints its address. A coordinator outlives the
process that spawned it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, Self

from ..deadline import Deadline
from ..errors import CoordinationError
from ..settings import Endpoint, JobIdentity, ServiceTimeouts
from .child import Child

# -P: in the working folder a module may have the name of one that a server imports.
PROGRAM = (sys.executable, "-P", "-m", "holdfast.coordination")


class SpawnedServer:
    """A server that this process has started; `address` is where it listens. A context manager."""

    def __init__(self, process: Child[bytes], address: str) -> None:
        self._process = process
        self.address = address

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def _next_address(self, what: str, timeout_s: float) -> str:
        """Returns the next address that it prints: "`what` at ADDRESS"."""
        _, address = _first_line(self._process, what, timeout_s)
        if not address:
            raise CoordinationError(
                f"the {what} gave no address within {timeout_s:g} s", code="UNAVAILABLE"
            )
        return address

    def close(self) -> None:
        """Ends the server, at once. Does nothing where it has ended."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)  # SIGTERM would wait for its processes
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        close_pipes(self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def start(
    what: str,
    command: Sequence[str],
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    settings: bytes | None = None,
) -> tuple[Child[bytes], str]:
    """Starts a server, and returns it with the address that it prints: "`what` at ADDRESS".

    `settings` are written to its input, which then stays open, so that it notices when this process
    ends. Raises CoordinationError with what it printed where it prints no address within
    `timeout_s`.
    """
    # A file, not a pipe: a server that prints much must not wait for a reader.
    with tempfile.TemporaryFile() as errors:
        stdin = subprocess.DEVNULL if settings is None else subprocess.PIPE
        process: Child[bytes] = Child(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            env=None if environment is None else dict(environment),
        )
        if settings is not None:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended, and has printed why
                process.stdin.write(settings)
                process.stdin.flush()
        return process, _address_of(process, what, errors, timeout_s)


def _address_of(process: Child[bytes], what: str, errors: IO[bytes], timeout_s: float) -> str:
    line, address = _first_line(process, what, timeout_s)
    if address:
        return address
    process.kill()
    process.wait()
    close_pipes(process)
    errors.seek(0)
    printed = errors.read(10_000).decode(errors="replace").strip() or line
    why = f"it said: {printed}" if printed else f"it said nothing within {timeout_s:g} s"
    raise CoordinationError(f"the {what} did not start; {why}", code="UNAVAILABLE")


def _first_line(process: Child[bytes], what: str, timeout_s: float) -> tuple[str, str]:
    """Returns the first line, and the address in it, "" where it is no "`what` at ADDRESS"."""
    assert process.stdout is not None
    deadline = Deadline(timeout_s)
    # Not `select.select`, which takes no descriptor above 1023: the program may have many files.
    readable = select.poll()
    readable.register(process.stdout, select.POLLIN)
    printed = b""
    while not printed.endswith(b"\n"):
        is_there = readable.poll(min(1000 * deadline.remaining_s(), 1 << 30))
        chunk = os.read(process.stdout.fileno(), 4096) if is_there else b""
        if not chunk:
            break
        printed += chunk
    line = printed.decode(errors="replace").strip()
    before, _, address = line.partition(f"{what} at ")
    return line, "" if before else address


def close_pipes(process: Child[bytes]) -> None:
    """Closes this process's ends of a server's input and output."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


class CoordinationService(SpawnedServer):
    """A coordinator that this process has started.

    `address` is host:port, or unix:PATH where it listens at a socket. Use `spawn`; the object is a
    context manager. Safe to use from several threads.
    """

    @classmethod
    def spawn(
        cls,
        num_processes: int,
        *,
        job: JobIdentity = JobIdentity(),
        endpoint: Endpoint = Endpoint(),
        timeouts: ServiceTimeouts = ServiceTimeouts(),
        recoverable: bool = False,
        survivable: bool = False,
        journal: str | None = None,
        arguments: tuple[str, ...] = (),
    ) -> Self:
        """Starts a coordinator and returns when it serves.

        `arguments` are further options of `holdfast coordinator`. The coordinator outlives this
        process, unless `--end-with-input` is one of them. Raises CoordinationError with what the
        coordinator printed where it does not serve.
        """
        command = [
            *PROGRAM,
            "coordinator",
            f"--num-processes={num_processes}",
            f"--job={job.name}",
            f"--attempt={job.attempt}",
            *endpoint.options(),
            f"--heartbeat-timeout-s={timeouts.heartbeat_s}",
            f"--shutdown-timeout-s={timeouts.shutdown_s}",
            f"--linger-s={timeouts.linger_s}",
            f"--startup-timeout-s={timeouts.startup_s}",
            *arguments,
        ]
        if recoverable:
            command.append("--recoverable")
        if survivable:
            command.append("--survivable")
        if journal:
            command.append(f"--journal={journal}")
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("GRPC_", "JAX_", "XLA_"))
        }
        # No pool of threads reads its sockets (cli/coordinator.py); gRPC reads this when it is
        # imported.
        environment["GRPC_EXPERIMENTS"] = "-event_engine_client,-event_engine_listener"
        settings = b"" if "--end-with-input" in arguments else None
        return cls(*start("coordinator", command, timeouts.spawn_s, environment, settings=settings))

    def wait(self, timeout_s: float | None) -> int:
        """Waits until the coordinator has ended by itself and returns its exit code; TimeoutError
        after `timeout_s` (None: never). A code that nobody can know is 255.
        """
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as late:
            raise TimeoutError(
                f"the coordinator at {self.address} still runs after {late.timeout:g} s"
            ) from None
