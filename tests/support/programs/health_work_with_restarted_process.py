"""Runs in the processes of tests/system/test_health.py."""

from __future__ import annotations

import os
import time

from health_start import group, index

from holdfast import multihost
from holdfast.coordination import ProcessLost

while [info.state for info in multihost.health().processes()] != ["CONNECTED"] * 2:
    time.sleep(0.01)
print("begun", flush=True)
if index == 1:
    time.sleep(1000)
while 1 not in multihost.health().failed():
    time.sleep(0.01)
try:
    group.barrier("together", timeout_s=60)
except ProcessLost as error:
    print("refused", error.process, flush=True)
print(
    "alive", sorted(multihost.live_processes()), "refused", multihost.health().failed(), flush=True
)
os._exit(0)
