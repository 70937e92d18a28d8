"""Runs in tests/system/test_unmodified_jax.py: a call of C holds the interpreter for longer than
the coordinator's heartbeat timeout.
"""

from __future__ import annotations

import ctypes
import os
import sys

import jax

from holdfast.coordination import CoordinationClient

address = sys.argv[3]
client = CoordinationClient(address, 0)
client.connect()
jax.distributed.initialize(
    address, 1, 0, heartbeat_timeout_seconds=3, coordinator_bind_address="127.0.0.1:0"
)
ctypes.PyDLL(None).sleep(9)
client.key_value_set("after", "it lives")
os._exit(0)
