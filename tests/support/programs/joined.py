"""Importing this joins a job: argv has index, count, port and root.

A port is that of jax.distributed's own service. Where it says "launched" instead, the environment
names the job.
"""

from __future__ import annotations

import sys

import jax

index = int(sys.argv[1])
count = int(sys.argv[2])
port = sys.argv[3]
root = sys.argv[4]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
if port == "launched":
    # Imported late: what comes first is ended last, and jax is to outlive us as in any program.
    from holdfast import multihost

    multihost.initialize(timeout_s=60)
else:
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(address, count, index, coordinator_bind_address=address)
