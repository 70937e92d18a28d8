"""Runs in the processes of tests/system/test_unmodified_jax.py."""

from __future__ import annotations

import os
import sys
import time

import jax

index = int(sys.argv[1])
count = int(sys.argv[2])
address = sys.argv[3]
jax.config.update("jax_enable_recoverability", True)
jax.distributed.initialize(address, count, index, heartbeat_timeout_seconds=4)
from jax._src import distributed

client = distributed.global_state.client
client.wait_at_barrier("all", 60_000)
print("together", flush=True)
if index == 0:
    time.sleep(100)
while True:
    try:
        client.wait_at_barrier("again", 60_000)
        raise SystemExit("passed without process 0")
    except jax.errors.JaxRuntimeError as error:
        print(error, flush=True)
        break
rest = list(range(1, count))
for step in range(20):
    client.wait_at_barrier(f"rest {step}", 60_000, rest)
client.key_value_set(f"done/{index}", "1")
print("went on", flush=True)
os._exit(0)
