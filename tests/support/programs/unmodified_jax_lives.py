"""Joins its job twice: `unmodified_jax_lives.py INDEX COUNT ADDRESS LIFE`. Its first life leaves a
key, and is killed.
"""

import sys
import time

import jax
from jax._src import distributed

_, index, count, address, life = sys.argv
jax.distributed.initialize(address, int(count), int(index), initialization_timeout=60)
client = distributed.global_state.client
if life == "first":
    client.key_value_set(f"left/{index}", life)
    print("left a key", flush=True)
    time.sleep(600)
print("found", client.key_value_dir_get("left"), flush=True)
client.wait_at_barrier("together", 60_000)
print("together", flush=True)
jax.distributed.shutdown()
