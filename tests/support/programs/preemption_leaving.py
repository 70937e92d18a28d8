"""Runs in the processes of tests/system/test_preemption.py."""

from __future__ import annotations

import sys
import time

from preemption_start import address, count, index

from holdfast import multihost

multihost.initialize(address, count, index, timeout_s=60)
assert not multihost.reached_preemption(10 if index == 0 else 0)
if index == 0:
    print("leaving", flush=True)
    multihost.shutdown(timeout_s=float(sys.argv[4]))
    print("left", flush=True)
    raise SystemExit
print("asking", flush=True)
step = 1
while step < 200 and not multihost.reached_preemption(step):
    time.sleep(0.01)
    step += 1
print(f"stopped at {step}", flush=True)
multihost.shutdown()
