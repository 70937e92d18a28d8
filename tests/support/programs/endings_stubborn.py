"""Runs in the processes of tests/system/test_endings.py."""

from __future__ import annotations

import os
import signal
import time

from holdfast.coordination import CoordinationClient

me = int(os.environ["HOLDFAST_PROCESS_ID"])
signal.signal(signal.SIGTERM, lambda *_: print("asked to end", flush=True))
client = CoordinationClient(os.environ["HOLDFAST_COORDINATOR"], me)
client.connect()
if me == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    time.sleep(600)
