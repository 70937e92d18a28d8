"""The place of a process in its job, which one process of a host alone has.

Whoever copies the environment of a process says that it is that one. A place is held by a socket
without a name in any folder, which the kernel closes with the process.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from contextlib import suppress

from ..errors import StartupFailed, failed_start
from ..parent import peer_pid
from ..spec import ProcessSpec, place_of

_ENDING_S = 5.0  # for a process that is about to be gone
_AGAIN_S = 0.1


class HeldPlace:
    """Holds the place of a process in its job on this host, until it is closed or the process ends.

    Raises StartupFailed, after some seconds, where another process holds it. Does nothing where the
    system has no such sockets.
    """

    def __init__(self, spec: ProcessSpec) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        digest = hashlib.sha256(json.dumps([os.getuid(), *place_of(spec)]).encode()).hexdigest()
        address = f"\0holdfast-place-{digest}"
        deadline = time.monotonic() + _ENDING_S
        while sys.platform == "linux":
            try:
                self._socket.bind(address)
                self._socket.listen()
                return
            except OSError:
                if time.monotonic() > deadline:
                    self._socket.close()
                    raise _taken(spec, _pid_at(address)) from None
                time.sleep(_AGAIN_S)

    def close(self) -> None:
        """Lets another process have it."""
        self._socket.close()


def _pid_at(address: str) -> int:
    """Returns the process that listens at a socket, 0 where that is not known."""
    with socket.socket(socket.AF_UNIX) as asking, suppress(OSError):
        asking.connect(address)
        return peer_pid(asking)
    return 0


def _taken(spec: ProcessSpec, pid: int) -> StartupFailed:
    return failed_start(
        spec,
        f"process {spec.process_id} of job {spec.job_id!r}, attempt {spec.attempt}, lives on this"
        f" host already (pid {pid}), and this one (pid {os.getpid()}) says by its environment or"
        " its spec that it is the same: give each process a number of its own, or unset HOLDFAST_*"
        " for a program that is no process of that job",
    )
