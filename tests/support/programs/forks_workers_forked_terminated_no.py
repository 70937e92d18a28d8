"""Runs in the processes of tests/system/test_forks.py."""

from __future__ import annotations

import multiprocessing
import sys
import time

from forks_start import unharmed
from starting import count, index

import holdfast.multihost as multihost

multihost.initialize(sys.argv[3], count, index, timeout_s=60)
if index == 0:
    context = multiprocessing.get_context("fork")
    ready = context.Semaphore(0)
    workers = [
        context.Process(target=lambda: (ready.release(), time.sleep(1000))) for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    for _ in workers:
        ready.acquire()
    for worker in workers:
        worker.terminate()
        worker.join(30)
    print("ended by", [worker.exitcode for worker in workers], flush=True)
unharmed()
assert not multihost.reached_preemption(1) and multihost.preemption_notice() is None
unharmed()
multihost.shutdown()
