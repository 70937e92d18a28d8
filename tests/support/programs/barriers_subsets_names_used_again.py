"""Runs in the processes of tests/system/test_barriers.py."""

from __future__ import annotations

from barriers_start import index

import holdfast.multihost as multihost
from holdfast.multihost import get_barrier_sync_fn, sync_global_processes

mine = {0, 2} if index in (0, 2) else {1, 3}
half = get_barrier_sync_fn(processes=mine)
for turn in range(20):
    sync_global_processes("step", timeout=30)
    sync_global_processes("step", timeout=30, processes=mine)
    half(key="step", timeout_ms=30000)
    half(key=f"step {turn}", timeout_ms=30000)

multihost.shutdown()
