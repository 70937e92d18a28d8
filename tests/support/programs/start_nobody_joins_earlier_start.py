"""Runs in the processes of tests/system/test_start.py."""

from __future__ import annotations

import sys

from starting import count, index

import holdfast.multihost as multihost

multihost.initialize(sys.argv[3], count, index, timeout_s=60)
assert multihost.current_client().key_value_dir_get("left behind") == []
multihost.sync_global_processes("all")
multihost.shutdown()
