"""Runs in the processes of tests/system/test_preemption.py."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time

import jax
from preemption_start import address, count, index

from holdfast import multihost
from holdfast.multihost.preemption import preemption as notices

service = sys.argv[4]
source = sys.argv[5]
path = sys.argv[6]
seeds = range(*eval(sys.argv[7]))
strides = eval(sys.argv[8])
signal.signal(signal.SIGTERM, lambda number, frame: print("the user's handler ran", flush=True))
if service == "ours":
    multihost.initialize(address, count, index, preemption_sources=[])
else:
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(address, count, index)
client = multihost.current_client()
for seed in seeds:
    rng = random.Random(1000 * seed + index)
    slurm_end = time.time() + 60 + 0.3 + rng.random() * 0.5 if index == seed % count else 2e9
    sources = {
        "signal": lambda: None,
        "file": lambda: [multihost.WatchedFile(f"{path}/{seed}", every_s=0.02)],
        "gce": lambda: [multihost.GceMetadata(host=f"{path}/{seed}", every_s=0.02)],
        "slurm": lambda: [multihost.SlurmEnd(slurm_end, lead_s=60, every_s=0.02)],
        "program": list,
    }[source]()
    notices.stop()
    notices.start(client, index, count, sources=sources)
    client.wait_at_barrier(f"begin {seed}", 60_000)
    print(f"ready {seed}.", flush=True)
    if source == "program" and index == seed % count:
        threading.Timer(
            rng.random() * 0.5, multihost.notify_preemption, [multihost.Notice("drained")]
        ).start()
    stride = strides[seed % len(strides)]
    step = 0
    longest_s = rng.choice([0.002, 0.005, 0.02])
    while not multihost.reached_preemption(step):
        time.sleep(rng.random() * longest_s)
        step += stride
    print(f"seed {seed} stopped at {step}", flush=True)
    assert multihost.reached_preemption(step) and multihost.reached_preemption(step + stride)
    client.wait_at_barrier(f"end {seed}", 60_000)
    notices.stop()
if service == "ours":
    multihost.shutdown()
else:
    jax.distributed.shutdown()
