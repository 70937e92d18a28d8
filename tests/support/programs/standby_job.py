"""Joins, reports its first step, and says whether it began as a standby.

The first attempt waits for the file "go", then fails.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time

from holdfast.coordination import CoordinationClient

attempt = os.environ["HOLDFAST_ATTEMPT"]
client = CoordinationClient(
    os.environ["HOLDFAST_COORDINATOR"], int(os.environ["HOLDFAST_PROCESS_ID"])
)
client.connect()
print("warm" if "_holdfast_standby" in sys.modules else "cold", attempt, flush=True)
client.report(step=1)
while attempt == "1" and not pathlib.Path("go").exists():
    time.sleep(0.02)
client.shutdown()
sys.exit(attempt == "1")
