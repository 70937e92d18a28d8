"""Runs in the processes of tests/system/test_faults.py."""

from __future__ import annotations

import sys

from holdfast.coordination import CoordinationClient, CoordinationError, Timeouts


def tell(error):
    print("told", type(error).__name__, error.code, flush=True)


client = CoordinationClient(
    sys.argv[3],
    int(sys.argv[1]),
    timeouts=Timeouts(heartbeat_s=3, init_s=60, shutdown_s=5),
    on_error=tell,
)
client.connect()
print("up", flush=True)
try:
    client.blocking_key_value_get("end", 60_000)
    print("told nothing", flush=True)
except CoordinationError as error:
    print("call ended", error.code, flush=True)
client.close()
