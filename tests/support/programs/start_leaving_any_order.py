"""Runs in the processes of tests/system/test_start.py."""

from __future__ import annotations

import sys
import time

from starting import count, index

import holdfast.multihost as multihost

try:
    raise OSError("no cache here")
except OSError:  # what was caught before the job began is no error of the job's
    multihost.initialize(sys.argv[3], count, index, timeout_s=60)
    if index == int(sys.argv[4]):
        time.sleep(1.5)
    try:
        if sys.argv[5] == "75":
            raise multihost.Preempted("all leave")
        sys.exit()
    finally:
        multihost.shutdown()
