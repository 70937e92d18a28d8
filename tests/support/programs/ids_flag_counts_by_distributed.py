"""Runs in the processes of tests/system/test_ids.py."""

from __future__ import annotations

import jax
import numpy as np
from absl import flags
from ids_start import index

import holdfast.multihost as multihost
from holdfast.multihost.group.ids import ProcessIds, initialize_ids

RUNTIME = [2, 0, 3, 1]
me = RUNTIME[index]
initialize_ids(ProcessIds(me, index, (index,)))
jax.process_index = lambda backend=None: me
name = "experimental_orbax_use_distributed_process_id"
assert name not in flags.FLAGS and multihost.process_index() == me
flags.DEFINE_bool(name, False, "")
assert multihost.process_index() == me  # not parsed yet
flags.FLAGS(["program", "--" + name])
assert multihost.use_experimental_distributed_process_id() and multihost.process_index() == index
assert multihost.is_primary_host(index) and not multihost.is_primary_host((index + 1) % 4)


class Device:
    def __init__(self, process_index):
        self.process_index = process_index


assert [multihost.process_index_from_device(Device(runtime)) for runtime in range(4)] == [
    1,
    3,
    0,
    2,
]
assert multihost.unique_processes_from_devices(
    np.array([[Device(0), Device(0)], [Device(2), Device(0)]])
) == {1, 0}
multihost.sync_global_processes(
    "by distributed id", timeout=30, processes={0, 1} if index in (0, 1) else {2, 3}
)
