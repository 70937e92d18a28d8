"""Runs in the processes of tests/system/test_preemption.py."""

from __future__ import annotations

import os
import signal
import time

from preemption_start import address, count, index

from holdfast import multihost
from holdfast.multihost.preemption import preemption as notices

multihost.initialize(address, count, index, heartbeat_timeout_s=8, preemption_sources=[])
preemption = notices.current()
client = multihost.current_client()
multihost.reached_preemption(10 * index)
client.wait_at_barrier("asked", 60_000)
if index == 2:
    client.key_value_set(f"{preemption._sync.folder}/0/change", "2 raised")
    os.kill(os.getpid(), signal.SIGKILL)
client.blocking_key_value_get(f"{preemption._sync.folder}/0/change", 60_000)
if index == 0:
    multihost.notify_preemption(multihost.Notice("drained"))
step = 10 * index + 1
while not multihost.reached_preemption(step):
    time.sleep(0.01)
    step += 1
print(f"stopped at {step}")
