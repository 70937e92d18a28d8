"""Runs in the processes of tests/system/test_start.py."""

from __future__ import annotations

import os
import sys

from starting import count, index

import holdfast.multihost as multihost

multihost.initialize(sys.argv[3], count, index, timeout_s=60, heartbeat_timeout_s=3)
multihost.current_client().key_value_set(f"left behind/{index}", "old", True)
multihost.sync_global_processes("all")
os._exit(9)
