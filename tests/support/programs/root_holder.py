"""Opens the root of argv[3] for writing, says so, and keeps it until its input ends."""

from __future__ import annotations

import sys

from holdfast.checkpoint import CheckpointManager

with CheckpointManager(sys.argv[3]) as manager:
    print(f"open {type(manager._root.group).__name__}", flush=True)
    sys.stdin.read()
