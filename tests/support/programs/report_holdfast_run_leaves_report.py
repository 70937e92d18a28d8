"""Runs in the processes of tests/web/test_report.py."""

from __future__ import annotations

import os
import sys

from holdfast.coordination import CoordinationClient

with CoordinationClient(
    os.environ["HOLDFAST_COORDINATOR"], int(os.environ["HOLDFAST_PROCESS_ID"])
) as client:
    attempt = int(os.environ["HOLDFAST_ATTEMPT"])
    client.report(step=7 * attempt)
    sys.exit(3 * (attempt == 1))
