"""Children of this process: how one has ended is known, or is known not to be."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import threading
import time
from typing import AnyStr

from ..deadline import Deadline

UNKNOWN_CODE = 255
"""Stands for an exit code that nobody knows: it is a failure."""

_SIG_DFL = 0
_SIG_IGN = 1
_STRUCT_BYTES = 512  # more than any system's `struct sigaction`, which begins with the handler
_LOOK_S = 0.02
_reaping = threading.Lock()


def keep_exit_codes() -> None:
    """Has the kernel keep the exit codes of this process's children, where SIGCHLD is ignored.

    A shell, a supervisor or a runtime may have ignored it: that is inherited. For processes that
    are launchers; any thread may call it.
    """
    # Not by Python's own functions: they know nothing of what C++ has set, such as Ray's, and set
    # in the main thread alone.
    libc = ctypes.CDLL(None)
    found = ctypes.create_string_buffer(_STRUCT_BYTES)
    libc.sigaction(signal.SIGCHLD, None, found)
    if ctypes.c_void_p.from_buffer(found).value == _SIG_IGN:
        libc.signal(signal.SIGCHLD, _SIG_DFL)


class Child(subprocess.Popen[AnyStr]):
    """A child whose exit code is never guessed.

    `subprocess` takes 0 for that of a child that somebody else has waited for, or that the kernel
    has forgotten since SIGCHLD is ignored. Here it is UNKNOWN_CODE, and `is_unknown` says so.
    """

    is_unknown = False

    def poll(self) -> int | None:
        """Returns the exit code, minus the signal's number; None while it runs."""
        with _reaping:
            if self.returncode is None:
                self._reap()
            return self.returncode

    def _reap(self) -> None:
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            self.is_unknown = True
            self.returncode = UNKNOWN_CODE
            return
        if pid:
            self.returncode = os.waitstatus_to_exitcode(status)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end, and returns the exit code. subprocess.TimeoutExpired after a time."""
        if timeout is None and self.returncode is None:
            # The exit status is left where it is, for `poll` of any thread.
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        deadline = Deadline(math.inf if timeout is None else timeout)
        while (code := self.poll()) is None:
            if deadline.passed():
                raise subprocess.TimeoutExpired(self.args, deadline.timeout_s)
            time.sleep(_LOOK_S)
        return code
