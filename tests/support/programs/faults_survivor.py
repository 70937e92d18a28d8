"""Runs in a process of tests/system/test_faults.py: waits for a key, then at a barrier."""

from __future__ import annotations

import sys

from holdfast.coordination import CoordinationClient

_, _, _, address, index, count = sys.argv
with CoordinationClient(address, int(index)) as client:
    print("started", flush=True)
    client.blocking_key_value_get("news", 120_000)
    client.wait_at_barrier("after", 60_000)
