"""Copies a checkpoint between stores, `SOURCE TARGET`; prints by how many bytes the memory of this
process grew meanwhile, at most.
"""

from __future__ import annotations

import sys
from pathlib import Path

from click.testing import CliRunner

import holdfast.checkpoint.tools.copy  # noqa: F401  # what is imported is not the copy's memory
from holdfast.cli.entry import main


def status(key: str) -> int:
    """Returns a size of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


SOURCE, TARGET = sys.argv[1:]
Path("/proc/self/clear_refs").write_text("5")  # begins the peak of memory anew
before_bytes = status("VmRSS")
result = CliRunner().invoke(main, ["cp", SOURCE, TARGET])
assert result.exit_code == 0, (result.output, result.exception)
print(status("VmHWM") - before_bytes)
