"""Reports steps: attempt 1 until the file of its argument is there, the next one twelve."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from holdfast.coordination import CoordinationClient

first = os.environ["HOLDFAST_ATTEMPT"] == "1"
done = Path(sys.argv[1])
client = CoordinationClient(
    os.environ["HOLDFAST_COORDINATOR"], int(os.environ["HOLDFAST_PROCESS_ID"])
)
client.connect()
step = 0
while not done.exists() if first else step < 12:
    step += 1
    client.report(step=step)
    time.sleep(0.1)
if first:
    sys.exit(1)
client.shutdown()
