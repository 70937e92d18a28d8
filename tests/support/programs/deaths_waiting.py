"""Waits for the last process of a job, which dies, and says how it heard.

argv: index, count, address, what starts the processes ("task", or "" for nobody), whose client.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

index = int(sys.argv[1])
count = int(sys.argv[2])
address, starter, whose = sys.argv[3:6]
if starter and "HOLDFAST_COORDINATOR" not in os.environ:
    holdfast = str(Path(sys.executable).parent / "holdfast")
    own = ["--", sys.executable, *sys.argv]
    os.execv(holdfast, ["holdfast", "task", "--coordinator", address, *own])
last = count - 1


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # whole: jaxlib's log goes to the same place


if whose == "ours":
    from holdfast.coordination import CoordinationClient, JobIdentity

    job = JobIdentity(num_processes=count)
    client = CoordinationClient(address, index, job=job, host=f"b{index}")
    depends = {"depends_on": [last]}
else:
    from jaxlib import _jax

    client = _jax.get_distributed_runtime_client(
        address, index, init_timeout=60, shutdown_timeout=1, heartbeat_timeout=86400
    )
    depends = {}
client.connect()
if index == last:
    say(f"pid {os.getpid()}")
    client.blocking_key_value_get("never", 600_000)
client.key_value_set(f"waits/{index}", "")
say("waits")
try:
    if index % 2:
        client.blocking_key_value_get("value", 60_000, **depends)
    else:
        client.wait_at_barrier("meet", 60_000)
except Exception as error:
    say("failed " + json.dumps([time.time(), type(error).__name__, str(error)]))
os._exit(0)
