"""Runs in the processes of tests/system/test_watchdog.py."""

from __future__ import annotations

import sys
import time

import jax

from holdfast.multihost import watchdog

index = int(sys.argv[1])
jax.config.update("jax_enable_recoverability", True)
jax.distributed.initialize(sys.argv[3], 2, index)
if index == 1:
    with watchdog(0.3, exit=True):
        time.sleep(100)
print(
    jax._src.distributed.global_state.client.blocking_key_value_get("holdfast/stacks/1", 60_000),
    flush=True,
)
