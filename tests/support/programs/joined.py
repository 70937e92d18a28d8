"""Importing this joins the job by jax.distributed: argv has index, count, port and root."""

from __future__ import annotations

import sys

import jax

index = int(sys.argv[1])
count = int(sys.argv[2])
port = sys.argv[3]
root = sys.argv[4]
address = f"127.0.0.1:{port}"
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, count, index, coordinator_bind_address=address)

# A mesh of all devices is made on import, which the job has to be joined for.
from sharded_state import goes, mesh, same, state  # noqa: E402

__all__ = ["count", "goes", "index", "mesh", "port", "root", "same", "state"]
