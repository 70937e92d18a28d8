"""Runs in the processes of tests/launch/workers/test_coordinator.py."""

from __future__ import annotations

import time
from pathlib import Path

from holdfast.launch.workers.coordinator import Coordinator

print(
    "pids",
    Coordinator("j", 1, 1).pid,
    (other := Coordinator("j", 1, 1, published=Path("/nonexistent"))).pid,
    flush=True,
)
time.sleep(600)
