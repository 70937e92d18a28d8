"""Says what jax sees, and how fast the disk and the way to the host are: a gigabyte each."""

from __future__ import annotations

import json
import os
import sys
import time

import jax
import jax.numpy as jnp
import jaxlib
import machine
import numpy as np
from plan import GB, Plan
from report import seconds, speed

plan = Plan.of_json(sys.argv[1])
device = jax.devices()[0]
nbytes = GB // 10 if plan.cpu else GB
if plan.smoke:
    nbytes //= 4

state = jax.block_until_ready(
    [jnp.full((1 << 22,), index, jnp.float32) for index in range(nbytes >> 24)]
)
nbytes = sum(leaf.nbytes for leaf in state)
first = machine.time_of(lambda: machine.copy_to_host(state, device))
later = machine.time_of(lambda: machine.copy_to_host(state, device))
arrays = [np.asarray(leaf).view(np.uint8) for leaf in state]
free = machine.free_bytes()
folder = plan.folder("probe")
fitting = arrays[: machine.room_bytes(folder.parent) // 2 // arrays[0].nbytes]
began = time.perf_counter()
machine.floor.write(folder, fitting)
took = time.perf_counter() - began
written = sum(array.nbytes for array in fitting)
machine.remove(folder)

memory = device.memory_stats() or {}
described = {
    "device": f"{len(jax.devices())} x {device.device_kind} ({device.platform})",
    "platform": device.platform,
    "memory": machine.describe_memory(device),
    "jax": jax.__version__,
    "jaxlib": jaxlib.__version__,
    "copy to the host": f"first {speed(nbytes, first)}, later {speed(nbytes, later)}",
    "disk, bare write with fsync": f"{speed(written, took)} ({seconds(took)})",
}
measured = {
    "device_bytes": memory.get("bytes_limit") or free,
    "host_free_bytes": free,
    "write_bytes_s": written / took,
}
print("PROBE " + json.dumps({"machine": described, "measured": measured}), flush=True)
os._exit(0)  # nothing of the device is to be let go in order: the next process waits
