"""Runs in the processes of tests/system/test_ids.py."""

from __future__ import annotations

import jax
from ids_start import client, index

import holdfast.multihost as multihost
from holdfast.coordination import BarrierTimeout
from holdfast.multihost import ClusterGroup
from holdfast.multihost.group.ids import ProcessIds, initialize_ids

RUNTIME = [2, 0, 3, 1]
me = RUNTIME[index]
initialize_ids(ProcessIds(me, index, (index,)))
assert multihost.runtime_to_distributed_ids() == [1, 3, 0, 2]
assert multihost.distributed_to_device_ids() == [[0], [1], [2], [3]]
jax.process_index = lambda backend=None: me  # what the runtime would say on TPU
for _ in range(5):
    multihost.sync_global_processes(
        "half", timeout=30, processes={0, 1} if me in (0, 1) else {2, 3}
    )
members = [0, 1] if me in (0, 1) else [2, 3]
half = ClusterGroup(client, members.index(me), 2, processes=members)
got = half.gather("g", b"%d" % me, timeout_s=30)
assert got == ([b"%d" % member for member in members] if half.index == 0 else None)
if me != 3:
    try:
        multihost.sync_global_processes("three", timeout=2)
    except BarrierTimeout as error:
        print("missing", error.missing)
client.wait_at_barrier("end", 60000)
