"""What programs of tests/system/test_health.py begin with."""

from __future__ import annotations

import sys

from holdfast import multihost

index = int(sys.argv[1])
count = int(sys.argv[2])
address = sys.argv[3]
heartbeat_s = float(sys.argv[4])
multihost.initialize(address, count, index, heartbeat_timeout_s=heartbeat_s)
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

group = multihost.default_group()


def total(devices):
    mesh = Mesh(np.array(devices), ("all",))
    mine = [
        jax.device_put(jnp.ones(1), device) for device in devices if device.process_index == index
    ]
    array = jax.make_array_from_single_device_arrays(
        (len(devices),), NamedSharding(mesh, PartitionSpec("all")), mine
    )
    return float(jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))(array))
