"""Busy processes, so that tests run as on a loaded machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
"""Ends with the process that started it, however that ends."""


@contextmanager
def load(count: int) -> Iterator[None]:
    """Keeps so many processes busy, with the priority of this one."""
    command = [sys.executable, "-S", "-c", BUSY]
    busy = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()
