"""What programs of tests/system/test_ids.py begin with."""

from __future__ import annotations

import sys

import jax
from jax._src import distributed

index = int(sys.argv[1])
count = int(sys.argv[2])
port = sys.argv[3]
jax.distributed.initialize(
    f"127.0.0.1:{port}", count, index, coordinator_bind_address=f"127.0.0.1:{port}"
)
jax.devices()
client = distributed.global_state.client
