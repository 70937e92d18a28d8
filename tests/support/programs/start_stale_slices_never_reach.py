"""Runs in the processes of tests/system/test_start.py."""

from __future__ import annotations

import os

import starting  # noqa: F401
from jax._src import xla_bridge

import holdfast.multihost as multihost
from holdfast.coordination import StatusClient

backends = xla_bridge.backends


def watched():
    if not xla_bridge.backends_are_initialized():
        print(
            "at the backend:",
            {key: value for key, value in os.environ.items() if key.startswith("MEGASCALE")},
        )
    return backends()


xla_bridge.backends = watched
multihost.initialize(timeout_s=60)
print("slices", multihost.slice_count())
client = multihost.current_client()
with StatusClient(client.address) as asking:
    (own,) = [task for task in asking.status().tasks if task.task_id == client.process_id]
print("reported", own.progress.values.get("num_slices"))
multihost.shutdown()
