"""Runs in the processes of tests/system/test_leases.py."""

from __future__ import annotations

import itertools
import sys
import time

from jax._src.lib import _jax

index = int(sys.argv[1])
address = sys.argv[3]
heartbeat_s = [2, 86400][int(sys.argv[1])]
client = _jax.get_distributed_runtime_client(
    address, index, init_timeout=60, shutdown_timeout=5, heartbeat_timeout=heartbeat_s
)
client.connect()
print("connected", flush=True)
try:
    for number in itertools.count():
        client.key_value_set(f"{index}/{number}", "1")
        time.sleep(0.1)
except Exception as error:
    print("refused", error, flush=True)
client.shutdown()
print("ended", flush=True)
