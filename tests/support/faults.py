"""Lets system calls of a save, an overwrite, a deletion or a conversion fail, each in turn: a fork
server under killpoint.c.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
OPERATIONS = ("save", "overwrite", "delete", "convert", "oneshot", "oneshot overwrite")
ERRORS = (errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EEXIST, errno.ENOENT)
TIMES = (1, 2, 1000)


class Fault(NamedTuple):
    """An errno that so many calls in a row return; with `after` each is made all the same, as where
    only its answer was lost.
    """

    error: int
    times: int
    after: bool

    def __str__(self) -> str:
        return f"{errno.errorcode[self.error]}-{self.times}-{'after' if self.after else 'before'}"


def inject(
    library: Path, operation: str, faults: Sequence[Fault], *, first: int = 0, every: int = 1
) -> list[dict[str, Any]]:
    """Begins each fault at the calls `first`, `first + every`, ... that touch the root; returns
    what fault_server.py says of each trial.
    """
    environment = {**os.environ, "LD_PRELOAD": str(library), "JAX_PLATFORMS": "cpu"}
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
        arguments = [scratch, operation, str(first), str(every), json.dumps(faults)]
        command = [sys.executable, str(HERE / "fault_server.py"), *arguments]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=110, check=False
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
