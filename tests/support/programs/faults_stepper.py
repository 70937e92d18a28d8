"""Runs in the processes of tests/system/test_faults.py."""

from __future__ import annotations

import sys

from holdfast.coordination import CoordinationClient, Timeouts

index = int(sys.argv[1])
count = int(sys.argv[2])
address = sys.argv[3]
client = CoordinationClient(
    address, index, timeouts=Timeouts(heartbeat_s=30, init_s=60, shutdown_s=20)
)
with client:
    for step in range(200):
        client.key_value_set(f"step/{step}/{index}", str(step))
        client.wait_at_barrier("step", 60_000)
        seen = client.key_value_dir_get(f"step/{step}")
        assert [value for _, value in seen] == [str(step)] * count, (step, seen)
        if step % 10 == 0:
            print("step", step, flush=True)
    print("breaks", client.statistics()["breaks"], flush=True)
