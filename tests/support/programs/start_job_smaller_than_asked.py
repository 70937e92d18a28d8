"""Runs in the processes of tests/system/test_start.py."""

from __future__ import annotations

import sys

import jax
from starting import count, index

import holdfast.multihost as multihost
from holdfast.coordination import CoordinationError

jax.process_count = lambda backend=None: 1  # as on a platform that has not joined
try:
    multihost.initialize(sys.argv[3], count, index, timeout_s=60)
except (multihost.StartupFailed, CoordinationError) as error:
    print("refused:", error)
assert not multihost.is_initialized()
