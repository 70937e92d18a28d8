"""Runs in the processes of tests/system/test_endings.py."""

from __future__ import annotations

import os
import sys
import time

from holdfast import multihost
from holdfast.coordination import StatusClient

multihost.initialize()
if os.environ["HOLDFAST_PROCESS_ID"] == "0":
    sys.exit(93)
with StatusClient(os.environ["HOLDFAST_COORDINATOR"]) as client:
    while not any(barrier.waiting for barrier in client.status().barriers):
        time.sleep(0.01)
os._exit(1)
