"""Starts the service as a process of its own, in a session of its own."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import IO, Self

from ._errors import CoordinationError

_PREFIX = "coordinator at "


class CoordinationService:
    """Is a coordinator that this process has started. It outlives this process, unless `close` ends it before.

    `address` is host:port. Use `spawn`; the object is a context manager. Safe to use from several threads.
    """

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self._process, self.address = process, address

    @classmethod
    def spawn(
        cls,
        num_processes: int,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        job: str = "",
        attempt: int = 0,
        recoverable: bool = False,
        survivable: bool = False,
        journal: str | None = None,
        heartbeat_timeout_s: float = 100.0,
        shutdown_timeout_s: float = 300.0,
        linger_s: float = 60.0,
        startup_timeout_s: float = 600.0,
        timeout_s: float = 60.0,
        arguments: tuple[str, ...] = (),
    ) -> Self:
        """Starts a coordinator and returns when it serves, within `timeout_s`.

        It ends by itself once every process has shut down or stayed dead for `linger_s` seconds, or when none comes within
        `startup_timeout_s`. `arguments` are further options of `holdfast coordinator`. Raises CoordinationError with what it printed where
        it does not serve.
        """
        options: dict[str, object] = {
            "num-processes": num_processes,
            "host": host,
            "port": port,
            "job": job,
            "attempt": attempt,
            "heartbeat-timeout-s": heartbeat_timeout_s,
            "shutdown-timeout-s": shutdown_timeout_s,
            "linger-s": linger_s,
            "startup-timeout-s": startup_timeout_s,
        }
        command = [sys.executable, "-c", "from holdfast.cli import main; main()", "coordinator"]
        command += [f"--{name}={value}" for name, value in options.items()]
        command += [f"--advertise={advertise}"] if advertise else []
        command += [f"--journal={journal}"] if journal else []
        command += ["--recoverable"] * recoverable + ["--survivable"] * survivable + list(arguments)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("GRPC_", "JAX_", "XLA_"))}
        # A file, not a pipe: a coordinator that has much to say must not wait for somebody to read it.
        with tempfile.TemporaryFile() as said:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said, start_new_session=True, env=environment
            )
            return cls(process, _address_of(process, said, timeout_s))

    @property
    def pid(self) -> int:
        """Is the coordinator's process id."""
        return self._process.pid

    def wait(self, timeout_s: float) -> int:
        """Waits until the coordinator has ended by itself and returns its exit code; TimeoutError after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the coordinator at {self.address} still runs after {timeout_s:g} s") from None

    def close(self) -> None:
        """Ends the coordinator, at once. Does nothing where it has ended."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _address_of(process: subprocess.Popen[bytes], errors: IO[bytes], timeout_s: float) -> str:
    """Reads the coordinator's first line."""
    deadline, printed = time.monotonic() + timeout_s, b""
    assert process.stdout is not None
    while not printed.endswith(b"\n") and time.monotonic() < deadline:
        readable, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        piece = os.read(process.stdout.fileno(), 4096) if readable else b""
        if readable and not piece:
            break
        printed += piece
    line = printed.decode(errors="replace").strip()
    if line.startswith(_PREFIX):
        return line.removeprefix(_PREFIX)
    process.kill()
    process.wait()
    process.stdout.close()
    errors.seek(0)
    said = errors.read(10_000).decode(errors="replace").strip() or line
    why = f"it said: {said}" if said else f"it said nothing within {timeout_s:g} s"
    raise CoordinationError(f"the coordinator did not start; {why}", code="UNAVAILABLE")


__all__ = ["CoordinationService"]
