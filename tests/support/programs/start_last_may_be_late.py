"""The last process comes late: argv[4] says by how many seconds, argv[5] by whose call."""

from __future__ import annotations

import sys
import time

import jax
from starting import count, index

import holdfast.multihost as multihost

address = sys.argv[3]
if index == count - 1:
    time.sleep(float(sys.argv[4]))
if sys.argv[5] == "ours":
    multihost.initialize(address, count, index, timeout_s=60)
else:
    jax.distributed.initialize(address, count, index, coordinator_bind_address="127.0.0.1:0")
assert jax.process_count() == count
jax._src.distributed.global_state.client.wait_at_barrier("all", 30_000)
print("started")
