"""Runs in the processes of tests/system/test_health.py: process 1 begins the second block, and asks
who lives in place of ending it.
"""

from __future__ import annotations

from health_start import index

from holdfast import multihost
from holdfast.coordination import CoordinationError

with multihost.live_devices():
    pass
try:
    if index == 1:
        multihost.live_processes()
        multihost.live_processes()
    else:
        with multihost.live_devices():
            pass
        print("ended well", flush=True)
except CoordinationError as error:
    print(error, flush=True)
multihost.shutdown()
