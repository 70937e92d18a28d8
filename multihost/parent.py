"""The process of a job that has started this one, where one has: this one is not that process.

A child inherits its parent's environment, and with it the names by which a launcher says who the
parent is. So whoever joins a job leaves a mark beside them, which says who has joined as that.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from contextlib import suppress

from holdfast.coordination.mounts import birth_of

from .errors import failed_start
from .spec import ProcessSpec, place_of

_MARK = "HOLDFAST_JOINED"
_CREDENTIALS = "3i"  # of a process at a socket: pid, user, group


def mark_children(spec: ProcessSpec) -> None:
    """Has the children that this process starts from now on know who it is."""
    pid = os.getpid()
    with suppress(OSError):  # no descriptor is free
        # The pid may be another's later.
        os.environ[_MARK] = json.dumps([pid, birth_of(pid), place_of(spec)])


def unmark_children() -> None:
    """Has the children from now on know nothing: this process has left."""
    os.environ.pop(_MARK, None)


def joined_parent(spec: ProcessSpec) -> int | None:
    """Returns the pid of the process that has started this one, directly or by others, after it had
    joined its job as what `spec` says. None where there is none, or it has ended.
    """
    with suppress(ValueError, TypeError, OSError):  # not ours, or nothing is known
        pid, born, place = json.loads(os.environ.get(_MARK) or "null")
        # A program that replaces itself (exec) keeps its pid and its environment.
        if pid != os.getpid() and "" != born == birth_of(pid) and place == place_of(spec):
            return int(pid)
    return None


def spec_of_launcher() -> ProcessSpec | None:
    """Returns who this process is, as its launcher's environment says.

    None without a launcher of ours, and in a child of the process that the environment speaks of.
    """
    spec = ProcessSpec.from_env(os.environ)
    return None if spec is None or joined_parent(spec) is not None else spec


def refuse_child(spec: ProcessSpec) -> None:
    """Raises StartupFailed where a parent of this process has joined as what `spec` says."""
    pid = joined_parent(spec)
    if pid is not None:
        raise failed_start(
            spec,
            f"this process (pid {os.getpid()}) is a child of process {spec.process_id} of job"
            f" {spec.job_id} (pid {pid}), which has joined it, and lives: call initialize()"
            ' under `if __name__ == "__main__":`, where children that multiprocessing starts do not'
            " come by; a child that is a program of its own calls initialize(num_processes=1), or"
            " none",
        )


def peer_pid(connection: socket.socket) -> int:
    """Returns the process at the other end of a Unix socket, 0 where the kernel does not know it.

    Raises OSError, and AttributeError where the system has no such question.
    """
    size = struct.calcsize(_CREDENTIALS)
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(struct.unpack(_CREDENTIALS, said)[0])
