"""Runs in the processes of tests/system/test_health.py: only process 0 asks who lives."""

from __future__ import annotations

from health_start import group, index

from holdfast import multihost
from holdfast.coordination import BarrierTimeout

if index == 0:
    try:
        multihost.live_processes(timeout_s=0.5)
    except BarrierTimeout as error:
        print(error.name, error.missing, error, flush=True)
group.barrier("asked", timeout_s=60)
multihost.shutdown()
