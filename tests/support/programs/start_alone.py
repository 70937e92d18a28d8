"""A process without a cluster: what initialize() refuses, and what works alone."""

from __future__ import annotations

import jax
from jax._src import xla_bridge

from holdfast import multihost

try:
    multihost.initialize(num_processes=4)
except ValueError as error:
    print(error)
assert not multihost.is_initialized()
multihost.initialize(local_device_ids=[0, 2])
assert multihost.is_initialized()
assert xla_bridge.CUDA_VISIBLE_DEVICES.value == "0,2"
assert jax.process_count() == 1
multihost.sync_global_processes("nobody")
assert multihost.global_max([3]) == [3]
assert multihost.reached_preemption(1) is False
assert multihost.health().processes() == []
assert multihost.preempted_processes() == ()
assert isinstance(multihost.default_group(), multihost.Solo)
multihost.shutdown()
assert not multihost.is_initialized()
try:
    multihost.initialize("127.0.0.1:1", 2, 0)
except RuntimeError as error:
    print(error)
