"""Executes a command that ends with its parent. Run as a script by its path: `python -I -S exec_with_pdeathsig.py PARENT_PID COMMAND...`.

A shim between fork and exec, in place of `preexec_fn`, which is unsafe in a process with threads. It imports nothing of holdfast.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before prctl
        os._exit(127)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"holdfast: cannot run {command[0]!r}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
