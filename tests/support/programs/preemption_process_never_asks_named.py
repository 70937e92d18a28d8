"""Runs in the processes of tests/system/test_preemption.py."""

from __future__ import annotations

import time

import jax
from preemption_start import address, count, end, index

from holdfast import multihost
from holdfast.multihost.preemption import preemption as notices

jax.config.update("jax_enable_preemption_service", False)
jax.distributed.initialize(address, count, index)
client = jax._src.distributed.global_state.client
if index != 2:
    preemption = notices.start(client, index, count, sources=[], timeout_s=12)
client.wait_at_barrier("started", 100_000)
if index != 2:
    multihost.notify_preemption(multihost.Notice("drained"))
    try:
        for step in range(10**6):
            multihost.reached_preemption(step)
            time.sleep(0.01)
    except TimeoutError as error:
        assert error.missing == (2,), error
        assert "no answer from process 2 of 3" in str(error), error
client.wait_at_barrier("done", 60_000)
end()
