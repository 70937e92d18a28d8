"""Runs in the processes of tests/system/test_health.py."""

from __future__ import annotations

import json
import sys
import time

import jax.numpy as jnp
import numpy as np
from health_start import group, index, total

from holdfast import multihost
from holdfast.coordination import ProcessLost

wait = sys.argv[5]
folder = sys.argv[6]


def save():
    from holdfast.checkpoint import CheckpointManager

    with CheckpointManager(folder) as manager:
        if index == 3:
            print("ready", flush=True)
            time.sleep(1000)
        print("waiting", flush=True)
        manager.save(1, {"w": np.arange(8)})
        manager.wait_until_finished()


def blocking_get():
    client = multihost.current_client()
    others = multihost.ClusterGroup(client, (index + 1) % 4, 4, processes=[3, 0, 1, 2])
    others.broadcast("value", None, timeout_s=60)


WAITS = {
    "barrier": lambda: multihost.sync_global_processes("meet", timeout=60),
    "blocking get": blocking_get,
    "gather": lambda: group.gather("parts", b"mine", timeout_s=60),
    "broadcast": lambda: multihost.broadcast_one_to_all(jnp.ones(3), timeout_s=60),
    "global_max": lambda: multihost.global_max([index], timeout_s=60),
    "save": save,
}


if wait == "save":
    pass
elif index == 3:
    print("ready", flush=True)
    time.sleep(1000)
else:
    print("waiting", flush=True)
try:
    WAITS[wait]()
except Exception as error:
    print(
        "failed",
        json.dumps(
            [time.time(), type(error).__name__, getattr(error, "process", None), str(error)]
        ),
        flush=True,
    )
try:
    multihost.sync_global_processes("later work", timeout=60)
except ProcessLost as error:
    print("refused", error.process, flush=True)
with multihost.live_devices() as devices:
    print(
        "went on with",
        int(total(devices)),
        [device.process_index for device in devices],
        flush=True,
    )
