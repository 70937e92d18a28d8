"""Runs in the processes of tests/system/test_preemption.py."""

from __future__ import annotations

import time

from preemption_start import begin, end, index

from holdfast import multihost

client, preemption = begin([])
mine = multihost.Notice(f"from {index}", deadline_unix_s=1000.0 + index)


def settle(value):
    while preemption._sync.latest != value or not preemption._news.empty():
        time.sleep(0.01)


multihost.notify_preemption(mine)
settle("raised")
client.wait_at_barrier("notified", 60_000)
assert multihost.reached_preemption(5) and multihost.preemption_notice() == multihost.Notice(
    "from 0", 1000.0
)
client.wait_at_barrier("asked", 60_000)
if index == 0:
    multihost.notify_preemption(None)
    while multihost.preemption_notice() != multihost.Notice("from 1", 1001.0):
        time.sleep(0.01)
client.wait_at_barrier("one left", 60_000)
assert multihost.reached_preemption(6)
client.wait_at_barrier("asked again", 60_000)
if index == 1:
    multihost.notify_preemption(None)
settle("lowered")
assert multihost.reached_preemption(6) and not multihost.reached_preemption(7)
assert multihost.preemption_notice() is None
client.wait_at_barrier("done", 60_000)
end()
