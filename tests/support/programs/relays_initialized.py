"""Runs in the processes of tests/system/test_relays.py."""

from __future__ import annotations

import sys

import jax
import numpy as np
from jax.experimental import multihost_utils

from holdfast import multihost

index = int(sys.argv[1])
count = int(sys.argv[2])
multihost.initialize(timeout_s=60)
assert jax.process_count() == count and jax.device_count() == count
multihost_utils.sync_global_devices("device collective")
assert multihost_utils.broadcast_one_to_all(np.int32(7 + index)) == 7
assert multihost_utils.process_allgather(np.int32([index])).ravel().tolist() == list(range(count))
assert multihost.global_max([index, -index]) == [count - 1, 0]
multihost.sync_global_processes("all", timeout=30)
multihost.shutdown()
print("done", flush=True)
