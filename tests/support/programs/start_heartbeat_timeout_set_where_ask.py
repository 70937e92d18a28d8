"""Runs in the processes of tests/system/test_start.py."""

from __future__ import annotations

import os
import sys

from starting import count, index

import holdfast.multihost as multihost
from holdfast.coordination import CoordinationError

try:
    multihost.initialize(
        sys.argv[3],
        count,
        index,
        timeout_s=60,
        heartbeat_timeout_s=None if sys.argv[4] == str(index) else 7,
    )
    assert "--xla_cpu_collective_timeout_seconds=7" in os.environ["XLA_FLAGS"], os.environ[
        "XLA_FLAGS"
    ]
    print("heartbeat timeout", multihost.current_client().heartbeat_timeout_s)
    multihost.shutdown()
except CoordinationError as error:
    print("refused:", error)
