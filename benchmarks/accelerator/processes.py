"""Runs a command within a limit, and ends all that it has started, with their stacks in its
output.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
DUMP_S = 3.0
END_S = 5.0
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Makes this process the parent of what its children leave behind, so that it finds them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a command whose output is read here, and which does not outlive this process."""
    return subprocess.Popen(
        command,
        # SIGABRT makes each Python below say where all its threads are.
        env=dict(environment) | {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=_end_with_parent,  # one thread here: nothing else holds a lock
    )


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    end_s: float,
    line: Callable[[str], None],
    watch: Callable[[], None] = lambda: None,
) -> int | None:
    """Runs a command to its end; returns its code, None where that second of the monotonic clock
    came first. Then each Python below has said where it is.

    `line` gets each line of the output as it comes, `watch` is called at least ten times a second.
    Nothing that the command has started is left.
    """
    process = start(command, environment)
    assert process.stdout is not None
    output = Lines(process.stdout.fileno())
    try:

        def is_over() -> bool:
            watch()
            return process.poll() is not None

        for text in output.until(end_s, is_over):
            line(text)
        if not output.is_open:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end_s - time.monotonic()))
        if process.poll() is None:
            _abort_below(os.getpid())
            for text in output.until(time.monotonic() + DUMP_S, lambda: False):
                line(text)
            return None
        return process.returncode
    finally:
        end_below(os.getpid())
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        process.stdout.close()


class Lines:
    """The lines of a pipe, as they come."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""
        self.is_open = True

    def until(self, end_s: float, is_over: Callable[[], bool]) -> Iterator[str]:
        """Yields lines until the pipe is closed, or until that second of the monotonic clock.

        Also where `is_over` and nothing more is there: what a process has left behind may keep its
        pipe open.
        """
        while self.is_open and time.monotonic() < end_s:
            over = is_over()
            wait_s = 0.0 if over else min(0.1, max(0.0, end_s - time.monotonic()))
            ready, _, _ = select.select([self._fd], [], [], wait_s)
            if ready:
                yield from self._read()
            elif over:
                break

    def _read(self) -> Iterator[str]:
        data = os.read(self._fd, 1 << 16)
        self.is_open = bool(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data and self._rest:
            lines.append(self._rest)
        for line in lines:
            yield line.decode(errors="replace")


def below(pid: int) -> list[int]:
    """Returns the processes below one, the deepest last."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            # The name before it may hold anything, also brackets.
            fields = path.read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = []
    todo = [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            found.append(child)
            todo.append(child)
    return found


def _abort_below(pid: int) -> None:
    _signal_all(below(pid), signal.SIGABRT)


def end_below(pid: int) -> None:
    """Ends all processes below one. A driver may hold one for ever: nobody waits for that."""
    end_s = time.monotonic() + END_S
    while (found := below(pid)) and time.monotonic() < end_s:
        _signal_all(found, signal.SIGKILL)
        time.sleep(0.02)  # nobody tells when a process that is no child of ours has ended


def _signal_all(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
