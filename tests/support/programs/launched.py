"""Importing this joins the job that the environment names: argv has index, count, port and root."""

from __future__ import annotations

import sys

import jax

from holdfast import multihost

index = int(sys.argv[1])
count = int(sys.argv[2])
port = sys.argv[3]
root = sys.argv[4]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
multihost.initialize(timeout_s=60)

# A mesh of all devices is made on import, which the job has to be joined for.
from sharded_state import goes, mesh, same, state  # noqa: E402

__all__ = ["count", "goes", "index", "mesh", "port", "root", "same", "state"]
