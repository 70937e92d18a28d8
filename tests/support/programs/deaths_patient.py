"""Runs in the processes of tests/system/test_deaths.py."""

from __future__ import annotations

import sys

from holdfast.coordination import CoordinationClient

index = int(sys.argv[1])
count = int(sys.argv[2])
address = sys.argv[3]
if index == 1:
    address = sys.argv[4]
client = CoordinationClient(address, index)
client.connect()
client.wait_at_barrier("meet", 60_000)
client.shutdown()
