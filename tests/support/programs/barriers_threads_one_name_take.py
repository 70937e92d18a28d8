"""Runs in the processes of tests/system/test_barriers.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import barriers_start  # noqa: F401

import holdfast.multihost as multihost
from holdfast.multihost import sync_global_processes

with ThreadPoolExecutor(8) as pool:
    for future in [pool.submit(sync_global_processes, "same", timeout=60) for _ in range(64)]:
        future.result()

multihost.shutdown()
