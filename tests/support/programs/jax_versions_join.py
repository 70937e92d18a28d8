"""Runs in the processes of tests/system/test_jax_versions.py."""

from __future__ import annotations

import sys

import jax

index, count, address = int(sys.argv[1]) + int(sys.argv[4]), int(sys.argv[5]), sys.argv[3]
jax.distributed.initialize(address, count, index, initialization_timeout=5)
