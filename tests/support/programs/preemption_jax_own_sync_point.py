"""Runs in the processes of tests/system/test_preemption.py."""

from __future__ import annotations

import sys
import time

from jax.experimental.multihost_utils import reached_preemption_sync_point
from preemption_start import begin, end, index

from holdfast import multihost

theirs = sys.argv[4] == "theirs"
client, preemption = begin([], service=True)
if index == 0 and theirs:
    client.key_value_set("RECEIVED_PREEMPTION_NOTICE", "2026-01-01T00:00:00+00:00")
elif index == 0:
    multihost.notify_preemption(multihost.Notice("drained"))
asked = multihost.reached_preemption if theirs else reached_preemption_sync_point
step = 0
while not asked(step):
    client.wait_at_barrier(f"step {step}", 60_000)
    time.sleep(0.01)
    step += 1
print(f"stopped at {step}")
client.wait_at_barrier("done", 60_000)
end()
