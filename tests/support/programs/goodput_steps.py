"""Runs in the process of tests/system/test_goodput.py: steps of a tenth of a second, a hang, and a
second of steps.

Its arguments are how long it steps and how long it hangs; it writes when each began and ended.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from holdfast.coordination import CoordinationClient

file = Path(sys.argv[1])
steps_s = float(sys.argv[2])
hang_s = float(sys.argv[3])
process = int(os.environ["HOLDFAST_PROCESS_ID"])
with CoordinationClient(os.environ["HOLDFAST_COORDINATOR"], process) as client:
    marks = [time.time()]
    step = 0
    while time.time() - marks[0] < steps_s:
        client.report(step=step)
        step += 1
        time.sleep(0.1)
    marks.append(time.time())
    time.sleep(hang_s)
    marks.append(time.time())
    for last in range(step, step + 10):
        client.report(step=last)
        time.sleep(0.1)
    if process == 0:
        file.write_text(json.dumps(marks))
