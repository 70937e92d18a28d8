"""Processes that cannot become orphans: each ends with this process, and all that it started."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from holdfast.coordination.process.child import Child, keep_exit_codes

_SHIMS = Path(__file__).resolve().parent / "shims"
_MAX_LINE = 1_000_000
_LAST_LINES_S = 5.0
_CHUNK = 1 << 16
_BAR_S = 60.0  # a progress bar that is drawn for longer is shown so often
CALL_RUNNER = _SHIMS / "call_runner.py"
STANDBY = _SHIMS / "standby.py"
_UNKNOWN = (
    "holdfast: how this process ended is not known, which counts as a failure: another part of the"
    " launcher's program has waited for it, or has SIGCHLD ignored"
)


class WorkerProcess:
    """One started process, below a subreaper that leaves nothing of it behind.

    `on_line` gets each line of stdout and stderr, without the newline, in pieces of at most a
    million characters; of a line that overwrites itself, such as a progress bar, it gets the last
    state, if it `folds`. With None both are this process's own. `on_exit` gets the exit code (minus
    the signal's number). It is called after the last line, and after all that the process left
    behind, in its session or another, has been killed. Each is called on a daemon thread of its
    own. `pass_fds` stay open in the process. The calling thread must outlive the process: on Linux
    all of it ends with that thread.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        cwd: str | Path | None = None,
        on_line: Callable[[str], None] | None,
        on_exit: Callable[[int], None],
        pass_fds: Sequence[int] = (),
        folds: bool = True,
    ) -> None:
        keep_exit_codes()
        self._on_line = on_line
        self._folds = folds
        self._on_exit = on_exit
        own_output = on_line is None
        # -I and -S: nothing of the user's environment or site-packages runs in the subreaper.
        self._popen: Child[bytes] = Child(
            [sys.executable, "-I", "-S", str(_SHIMS / "subreaper.py"), str(os.getpid()), *command],
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=None if own_output else subprocess.PIPE,
            stderr=None if own_output else subprocess.STDOUT,
            start_new_session=True,
            pass_fds=pass_fds,
        )
        self._ended = threading.Event()
        self._lock = threading.Lock()  # of the subreaper's input
        pid = self._popen.pid
        self._reader = threading.Thread(
            target=self._read, name=f"holdfast-output-{pid}", daemon=True
        )
        self._waiter = threading.Thread(target=self._wait, name=f"holdfast-wait-{pid}", daemon=True)
        try:
            self._reader.start()
            self._waiter.start()
        except RuntimeError:  # no thread more
            with self._popen:  # at the end of its input all of it ends
                raise

    def _read(self) -> None:
        if self._on_line is None:
            return
        assert self._popen.stdout is not None
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pending = ""
        shown_s = time.monotonic()
        with self._popen.stdout as stream:
            while data := os.read(stream.fileno(), _CHUNK):
                *lines, pending = (pending + decoder.decode(data)).split("\n")
                for line in lines:
                    self._show(line)
                while len(pending) > _MAX_LINE:
                    self._show(pending[:_MAX_LINE])
                    pending = pending[_MAX_LINE:]
                if self._folds and "\r" in pending:
                    pending = last_state(pending) + "\r" * pending.endswith("\r")
                    if time.monotonic() - shown_s > _BAR_S:
                        self._show(pending)
                        shown_s = time.monotonic()
        if pending := pending + decoder.decode(b"", True):
            self._show(pending)

    def _show(self, line: str) -> None:
        assert self._on_line is not None
        if self._folds:
            line = last_state(line)
        for begin in range(0, max(1, len(line)), _MAX_LINE):
            self._on_line(line[begin : begin + _MAX_LINE])

    def _wait(self) -> None:
        code = self._popen.wait()
        self._ended.set()
        with self._lock, contextlib.suppress(OSError):
            assert self._popen.stdin is not None
            self._popen.stdin.close()
        # What the process wrote comes before its end. A grandchild in another container may hold
        # the pipe open for ever: then its lines are not waited for.
        self._reader.join(_LAST_LINES_S)
        if self._popen.is_unknown:
            (self._on_line or _to_stderr)(_UNKNOWN)
        self._on_exit(code)

    def _send(self, line: str) -> None:
        stdin = self._popen.stdin
        assert stdin is not None
        with self._lock, contextlib.suppress(OSError):
            if not stdin.closed:
                stdin.write(line.encode())
                stdin.flush()

    @property
    def alive(self) -> bool:
        """Whether the process, or anything of it, is still there."""
        return not self._ended.is_set()

    def signal(self, number: int) -> None:
        """Sends a signal to the process itself, unless it has ended; not to what it started."""
        # By way of its parent, the subreaper: here the number may be another process's by now.
        self._send(f"signal {int(number)}\n")

    def kill(self) -> None:
        """Sends SIGKILL to the process and all that it started."""
        self._send("kill\n")

    def wait(self, timeout_s: float) -> bool:
        """Returns whether the process has ended and `on_exit` has returned within the time."""
        self._waiter.join(min(timeout_s, threading.TIMEOUT_MAX))
        return not self._waiter.is_alive()


def last_state(line: str) -> str:
    """Returns what a terminal shows of a line in the end: carriage returns begin it anew."""
    return line.rstrip("\r").rpartition("\r")[2]


class OomKills:
    """What the kernel says of processes here that it has ended for want of memory. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known = _oom_kills()

    def why(self, code: int) -> str:
        """Returns why a process ended with that code if the kernel has ended one more, else ""."""
        with self._lock:
            if code != -signal.SIGKILL or _oom_kills() <= self._known:
                return ""
            self._known += 1
        return "the kernel's OOM killer has ended a process: memory ran out"


def _oom_kills() -> int:
    """Returns how many processes of our cgroup, or else of the machine, the OOM killer has ended.

    Sources: memory.events in Linux's cgroup-v2.rst, memory.oom_control in cgroup-v1/memory.rst,
    /proc/vmstat in proc(5).
    """
    files = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                files.append(f"/sys/fs/cgroup{path}/memory.events")
            elif "memory" in controllers.split(","):
                files.append(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
    for file in (*files, "/proc/vmstat"):
        with contextlib.suppress(OSError):
            if found := re.search(r"^oom_kill (\d+)$", Path(file).read_text(), re.MULTILINE):
                return int(found[1])
    return 0


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
