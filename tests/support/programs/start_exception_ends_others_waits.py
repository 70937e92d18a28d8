"""Runs in the processes of tests/system/test_start.py."""

from __future__ import annotations

import sys
import time

from starting import count, index

import holdfast.multihost as multihost
from holdfast.coordination import ProcessLost

multihost.initialize(sys.argv[3], count, index, timeout_s=60, heartbeat_timeout_s=60)
if index == 1:
    multihost.sync_global_processes("near")
    try:
        raise RuntimeError("bad batch")
    finally:
        if sys.argv[4] == "closes":
            multihost.shutdown()
multihost.sync_global_processes("near")
start = time.monotonic()
try:
    multihost.sync_global_processes("far", timeout=50)
except ProcessLost as error:
    print("lost", error.process, time.monotonic() - start < 20, error)
