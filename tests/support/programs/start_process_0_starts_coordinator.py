"""Runs in the processes of tests/system/test_start.py."""

from __future__ import annotations

import sys
import time

from starting import count, index

import holdfast.multihost as multihost

if index == 0:
    time.sleep(1)  # the others knock at a door that is not there yet
multihost.initialize(sys.argv[3], count, index, timeout_s=60)
multihost.sync_global_processes("all")
multihost.shutdown()
