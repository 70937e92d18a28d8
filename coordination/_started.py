"""Servers of ours in processes of their own: started in a session of their own, known by the address that is their first line."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, Self

from ._errors import CoordinationError


class Started:
    """Is a server that this process has started; `address` is where it listens. A context manager."""

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self._process, self.address = process, address

    def close(self) -> None:
        """Ends the server, at once. Does nothing where it has ended."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        _close_pipes(self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def start(
    what: str, command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None, told: bytes | None = None
) -> tuple[subprocess.Popen[bytes], str]:
    """Starts a server, and returns it with the address that it prints: "`what` at ADDRESS".

    `told` is written to its input, which then stays open, so that it learns when this process ends. Raises CoordinationError with what it
    said where it prints no address within `timeout_s`.
    """
    # A file, not a pipe: a server that has much to say must not wait for somebody to read it.
    with tempfile.TemporaryFile() as said:
        stdin = subprocess.DEVNULL if told is None else subprocess.PIPE
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=said,
            start_new_session=True,
            env=None if environment is None else dict(environment),
        )
        if told is not None:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended, and has said why
                process.stdin.write(told)
                process.stdin.flush()
        return process, _address_of(process, what, said, timeout_s)


def _address_of(process: subprocess.Popen[bytes], what: str, said: IO[bytes], timeout_s: float) -> str:
    line, prefix = _first_line(process, timeout_s), f"{what} at "
    if line.startswith(prefix):
        return line.removeprefix(prefix)
    process.kill()
    process.wait()
    _close_pipes(process)
    said.seek(0)
    found = said.read(10_000).decode(errors="replace").strip() or line
    why = f"it said: {found}" if found else f"it said nothing within {timeout_s:g} s"
    raise CoordinationError(f"the {what} did not start; {why}", code="UNAVAILABLE")


def _first_line(process: subprocess.Popen[bytes], timeout_s: float) -> str:
    assert process.stdout is not None
    deadline, printed = time.monotonic() + timeout_s, b""
    while not printed.endswith(b"\n"):
        readable, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        piece = os.read(process.stdout.fileno(), 4096) if readable else b""
        if not piece:
            break
        printed += piece
    return printed.decode(errors="replace").strip()


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
