"""Starts the service as a process of its own, in a session of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Self

from ._started import Started, start


class CoordinationService(Started):
    """Is a coordinator that this process has started. It outlives this process, unless `close` ends it before.

    `address` is host:port. Use `spawn`; the object is a context manager. Safe to use from several threads.
    """

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
        return cls(*start("coordinator", command, timeout_s, environment))

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


__all__ = ["CoordinationService"]
