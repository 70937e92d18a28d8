"""Runs in the processes of tests/system/test_preemption.py."""

from __future__ import annotations

import os
import signal
import time

from preemption_start import address, count, index

from holdfast import multihost
from holdfast.multihost.start import start

start_jax = start.start_jax


def slowly(*arguments, **options):
    if index == 1:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    start_jax(*arguments, **options)


start.start_jax = slowly
multihost.initialize(address, count, index, timeout_s=60)
step = 0
while not multihost.reached_preemption(step):
    time.sleep(0.01)
    step += 1
print(f"stopped at {step}")
multihost.shutdown()
