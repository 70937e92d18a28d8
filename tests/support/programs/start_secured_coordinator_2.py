"""Runs in the processes of tests/system/test_start.py."""

from __future__ import annotations

import jax
from starting import index

import holdfast.multihost as multihost

multihost.initialize(timeout_s=60)
assert jax.process_count() == 2
assert multihost.global_max([index, -index]) == [1, 0]
multihost.sync_global_processes("all", timeout=30)
multihost.shutdown()
