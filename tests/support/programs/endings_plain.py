"""Runs in the processes of tests/system/test_endings.py."""

from __future__ import annotations

import os
import signal
import time

import jax

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_enable_preemption_service", False)
me = int(os.environ["HOLDFAST_PROCESS_ID"])
count = int(os.environ["HOLDFAST_NUM_PROCESSES"])
jax.distributed.initialize(num_processes=count, process_id=me)
from holdfast import multihost

multihost.sync_global_processes("all ask")
multihost.reached_preemption(0)
multihost.sync_global_processes("all have asked")
if me == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
