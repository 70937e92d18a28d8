"""An ordinary jax program of several processes, on every path of jax.distributed."""

import os
import signal
import sys

import jax
import numpy as np

index = int(sys.argv[1])
count = int(sys.argv[2])
# A launcher that has its own address for jax puts it into the environment.
address = os.environ.get("JAX_COORDINATOR_ADDRESS") or sys.argv[3]
if len(sys.argv) > 4:  # a part of a cluster: the first index here, and how many there are in all
    index = index + int(sys.argv[4])
    count = int(sys.argv[5])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, count, index)
from jax.experimental import multihost_utils as multihost

assert len(jax.devices()) == count * jax.local_device_count()
multihost.sync_global_devices("hello")
assert multihost.broadcast_one_to_all(np.float32(index + 5)) == 5
assert list(multihost.process_allgather(np.float32(index))) == list(range(count))
with multihost.live_devices(jax.devices()) as devices:
    assert len(devices) == len(jax.devices())
step = 0
while not multihost.reached_preemption_sync_point(step):
    step += 1
    if step == 3 and index == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    multihost.sync_global_devices(f"step {step}")
print("jax", jax.__version__)
print("preempted at", step)
jax.distributed.shutdown()
