"""Runs in the processes of tests/system/test_coordinator_restart.py."""

from __future__ import annotations

import sys

from holdfast.coordination import CoordinationClient

index = int(sys.argv[1])
count = int(sys.argv[2])
address = sys.argv[3]
client = CoordinationClient(address, index)
client.connect()
for step in range(200):
    client.wait_at_barrier(f"step/{step % 7}", 60_000)
    client.key_value_set(f"came/{step}/{index}", "1", allow_overwrite=True)
    if step % 50 == 0:
        print("step", step, flush=True)
client.wait_at_barrier("end", 60_000)
print("keys", len(client.key_value_dir_get("came")), flush=True)
client.shutdown()
