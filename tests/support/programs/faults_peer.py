"""Waits for all, and says how it heard that they cannot come: argv has index, count, address."""

from __future__ import annotations

import sys
import time

from holdfast.coordination import (
    CoordinationClient,
    CoordinationError,
    CoordinatorLost,
    JobIdentity,
    ProcessLost,
    Timeouts,
)

VICTIM = 2

# Each runs alone in a network of its own, so that its number is an argument.
index = int(sys.argv[4])
count = int(sys.argv[5])
client = CoordinationClient(
    sys.argv[3],
    index,
    job=JobIdentity(num_processes=count),
    timeouts=Timeouts(heartbeat_s=float(sys.argv[6]), init_s=60, shutdown_s=2),
)
client.connect()
client.wait_at_barrier("start", 60_000)
print("started", flush=True)
who: object = None
try:
    if index == VICTIM:
        client.blocking_key_value_get("never", 600_000)  # the victim waits too, but for another
    client.wait_at_barrier("all", 600_000)
except CoordinationError as error:
    if isinstance(error, ProcessLost):
        who = error.process
    elif isinstance(error, CoordinatorLost):
        who = error.address
    print("ended", time.monotonic(), type(error).__name__, who, flush=True)
client.close()
