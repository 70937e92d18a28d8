"""Runs in the processes of tests/system/test_leases.py."""

from __future__ import annotations

import os
import sys
import time

from holdfast.coordination import CoordinationClient, JobIdentity

index = int(sys.argv[1])
go = sys.argv[4]
with CoordinationClient(
    sys.argv[3], index, job=JobIdentity(num_processes=int(sys.argv[2]))
) as client:
    print("connected", flush=True)
    while index == 2 and not os.path.exists(go):
        time.sleep(0.05)
    client.wait_at_barrier("all", 60_000)
    print("met", flush=True)
