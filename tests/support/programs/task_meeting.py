"""Meets the other process of its job, prints its environment and arguments, and leaves the job when
its input ends.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from holdfast.coordination import CoordinationClient, Timeouts

client = CoordinationClient(
    os.environ["HOLDFAST_COORDINATOR"],
    int(os.environ["HOLDFAST_PROCESS_ID"]),
    timeouts=Timeouts(init_s=30),
)
client.connect()
client.wait_at_barrier("all", 30_000)
arguments = Path("/proc/self/cmdline").read_text()
print(json.dumps({"environment": dict(os.environ), "arguments": arguments}), flush=True)
sys.stdin.read()
client.shutdown()
