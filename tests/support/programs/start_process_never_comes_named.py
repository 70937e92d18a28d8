"""Runs in the processes of tests/system/test_start.py."""

from __future__ import annotations

import sys
import time

from starting import index

import holdfast.multihost as multihost
from holdfast.multihost import StartupTimeout

spec = multihost.ProcessSpec(
    process_id=[0, 2][index], num_processes=3, coordinator=sys.argv[3], job_id=""
)
start = time.monotonic()
try:
    multihost.initialize(spec=spec, timeout_s=3)
except StartupTimeout as error:
    print(
        "missing",
        error.processes,
        "knob",
        error.knob,
        error.timeout_s,
        "in time",
        time.monotonic() - start < 20,
        error,
    )
assert not multihost.is_initialized()
