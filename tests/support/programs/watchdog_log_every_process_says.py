"""Runs in the processes of tests/system/test_watchdog.py."""

from __future__ import annotations

import sys
import threading

from holdfast import multihost

index = int(sys.argv[1])
multihost.initialize(sys.argv[3], 3, index)


def load_batch():
    if index == 2:
        threading.Event().wait()


with multihost.watchdog(3):
    load_batch()
    multihost.sync_global_processes("step")
