"""Runs in the processes of tests/system/test_collectives.py."""

from __future__ import annotations

from collectives_start import index

import holdfast.multihost as multihost
from holdfast.coordination import BarrierTimeout

multihost.global_max([index])
if index:
    try:
        multihost.global_max([index, index], timeout_s=1.5)
    except BarrierTimeout as error:
        print("late:", error)
multihost.sync_global_processes("end")
import os

os._exit(0)  # the computation that nobody joined is still there
