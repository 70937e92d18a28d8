"""Runs in the processes of tests/system/test_preemption.py."""

from __future__ import annotations

import time

from preemption_start import address, count, index

from holdfast import multihost
from holdfast.multihost.preemption import preemption as notices


class Held:
    name = "held"
    closed = False

    def start(self, notify):
        self.notify = notify

    def close(self):
        self.closed = True


held = Held()
multihost.add_preemption_source(held)
assert not multihost.reached_preemption(-1)  # a question before the job
before = notices.current()
multihost.initialize(address, count, index, preemption_sources=[])
assert notices.current() is before and not held.closed
multihost.sync_global_processes("asked")
if index == 0:
    held.notify(multihost.Notice("drained"))
step = 0
while not multihost.reached_preemption(step):
    time.sleep(0.005)
    step += 1
print(f"stopped at {step}")
assert notices.current() is before and multihost.preemption_notice().reason == "drained"
assert multihost.preempted_processes() == (0,)
multihost.shutdown()
assert (
    held.closed and notices.current() is before and multihost.reached_preemption(step + 1)
)  # a late question
assert multihost.preemption_notice() == multihost.Notice("drained")
assert multihost.preempted_processes() == (0,)
