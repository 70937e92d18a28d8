"""Runs in the processes of tests/system/test_jax_versions.py."""

from __future__ import annotations

import sys

import jax

index = int(sys.argv[1]) + int(sys.argv[4])
count = int(sys.argv[5])
address = sys.argv[3]
jax.distributed.initialize(address, count, index, initialization_timeout=5)
