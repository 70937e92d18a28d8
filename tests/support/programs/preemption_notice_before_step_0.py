"""Runs in the processes of tests/system/test_preemption.py."""

from __future__ import annotations

import time

from preemption_start import begin, end, index

from holdfast import multihost

client, preemption = begin([])
if index == 0:
    multihost.notify_preemption(multihost.Notice("drained"))
while preemption._sync.latest != "raised":
    time.sleep(0.01)
assert multihost.reached_preemption(0)
client.wait_at_barrier("asked", 60_000)
end()
