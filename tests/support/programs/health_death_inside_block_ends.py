"""Runs in the processes of tests/system/test_health.py."""

from __future__ import annotations

import time

from health_start import index, total

from holdfast import multihost
from holdfast.coordination import ProcessLost

try:
    with multihost.live_devices() as devices:
        total(devices)
        print("inside", flush=True)
        if index == 2:
            time.sleep(1000)
        total(devices)
except ProcessLost as error:
    print("lost", error.process, flush=True)
with multihost.live_devices() as devices:
    print("went on with", int(total(devices)), flush=True)
