"""Runs in the processes of tests/system/test_watchdog.py."""

from __future__ import annotations

import sys
import threading

from holdfast import multihost

index = int(sys.argv[1])
multihost.initialize(sys.argv[3], 2, index)


def the_innocent_function():
    print("waiting", flush=True)
    threading.Event().wait()


def the_guilty_function():
    with multihost.watchdog(0.3, exit=True):
        threading.Event().wait()


the_guilty_function() if index else the_innocent_function()
