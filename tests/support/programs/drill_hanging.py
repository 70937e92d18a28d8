"""Runs in the processes of tests/system/test_drill.py."""

from __future__ import annotations

import os
import threading

from holdfast import multihost

multihost.initialize()


def load_batch():
    if os.environ["HOLDFAST_PROCESS_ID"] == "2":
        threading.Event().wait()


with multihost.watchdog(3, exit=True):
    load_batch()
    multihost.sync_global_processes("step")
