"""A trainer as people write them, of 0.05 s a step, that saves each tenth step and at a notice:
`below_a_shell.py ROOT`, or `below_a_shell.py ROOT exits` with a handler of SIGTERM that ends it.
"""

from __future__ import annotations

import signal
import sys
import time

import jax.numpy as jnp

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps

if sys.argv[2:] == ["exits"]:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
multihost.initialize()
with CheckpointManager(sys.argv[1], save_policy=EveryNSteps(10)) as manager:
    state = {"w": jnp.zeros(4)}
    for step in range(1, 100_000):
        state["w"] += 1
        manager.save(step, state)
        if step % 10 == 0:
            manager.wait_until_finished()
        if step % 10 == 5:
            multihost.default_group().report(step=step)
            print("step", step, flush=True)
        if multihost.reached_preemption(step):
            manager.wait_until_finished()
            print("left at", step, flush=True)
            sys.exit(75)
        time.sleep(0.05)
