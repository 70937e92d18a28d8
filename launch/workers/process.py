"""Processes that cannot become orphans: each leads a process group, ends with this process, and takes its group along."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_SHIMS = Path(__file__).resolve().parent / "shims"
CALL_RUNNER = _SHIMS / "call_runner.py"


class ProcessGroupReaper:
    """A process beside this one that kills the listed process groups when this one is gone. Thread-safe."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", str(_SHIMS / "process_group_reaper.py")]
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
        self._lock = threading.Lock()

    def _write(self, line: str) -> None:
        assert self._popen.stdin is not None
        with self._lock, contextlib.suppress(OSError):
            self._popen.stdin.write(line + "\n")
            self._popen.stdin.flush()

    def add(self, group: int) -> None:
        """Lists a process group."""
        self._write(f"+{group}")

    def discard(self, group: int) -> None:
        """Takes a process group, now empty, off the list."""
        self._write(f"-{group}")

    def close(self) -> None:
        """Ends the reaper, which kills whatever is still listed."""
        assert self._popen.stdin is not None
        with self._lock, contextlib.suppress(OSError):
            self._popen.stdin.close()
        self._popen.wait()


class WorkerProcess:
    """One started process. Two daemon threads serve it: one reads its output, one waits for its end.

    `on_line` gets each line of stdout and stderr, without the newline; `on_exit` the exit code (minus the signal's number), after the
    last line and after all that the process left behind in its group has been killed. Both are called on those threads. The calling
    thread must outlive the process: on Linux the kernel kills the process when that thread ends.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        reaper: ProcessGroupReaper,
        *,
        cwd: str | Path | None = None,
        on_line: Callable[[str], None],
        on_exit: Callable[[int], None],
    ) -> None:
        self._reaper = reaper
        self._on_line, self._on_exit = on_line, on_exit
        shim = [sys.executable, "-I", "-S", str(_SHIMS / "exec_with_pdeathsig.py"), str(os.getpid())]
        self._popen = subprocess.Popen(
            [*shim, *command],
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            bufsize=1,
            start_new_session=True,
        )
        self.pid = self._popen.pid
        reaper.add(self.pid)
        self._ended = threading.Event()
        self._reap_lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, name=f"holdfast-output-{self.pid}", daemon=True)
        self._waiter = threading.Thread(target=self._wait, name=f"holdfast-wait-{self.pid}", daemon=True)
        self._reader.start()
        self._waiter.start()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        with self._popen.stdout as stream:
            for line in stream:
                self._on_line(line.rstrip("\n"))

    def _wait(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)  # while it is a zombie, its number is not given to another
        with self._reap_lock:
            self._signal_group(signal.SIGKILL)
            code = self._popen.wait()
            self._ended.set()
        self._reaper.discard(self.pid)
        self._reader.join(5)
        self._on_exit(code)

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self.pid, number)

    @property
    def alive(self) -> bool:
        """Whether the process has not ended yet."""
        return not self._ended.is_set()

    def signal(self, number: int) -> None:
        """Sends a signal to the process itself, not to what it started; does nothing when it has ended."""
        with self._reap_lock:
            if self.alive:
                os.kill(self.pid, number)  # not Popen.send_signal, which would reap the process before the waiter does

    def kill(self) -> None:
        """Sends SIGKILL to the process and all of its group."""
        with self._reap_lock:
            if self.alive:
                self._signal_group(signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Waits until the process has ended and `on_exit` has returned; returns False when that is not in time."""
        self._waiter.join(timeout_s)
        return not self._waiter.is_alive()
