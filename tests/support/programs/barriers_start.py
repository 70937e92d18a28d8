"""What programs of barriers begin with: argv has index, count, port and whose client."""

from __future__ import annotations

import os
import sys

import jax

import holdfast.multihost as multihost

index = int(sys.argv[1])
count = int(sys.argv[2])
port = sys.argv[3]
which = sys.argv[4]
address = f"127.0.0.1:{port}"
# Empty where the coordinator has a timeout of its own.
heartbeat = os.environ.get("TEST_HEARTBEAT_S", "6")
timeouts = {"heartbeat_timeout_s": float(heartbeat)} if heartbeat else {}
if which == "ours":
    multihost.initialize(address, count, index, timeout_s=60, **timeouts)
else:
    jax.distributed.initialize(address, count, index, coordinator_bind_address=address)
jax.devices()
