"""Runs in the processes of tests/system/test_ids.py."""

from __future__ import annotations

from ids_start import client, count, index

import holdfast.multihost as multihost
from holdfast.multihost.group.ids import ProcessIds, exchange_ids, initialize_ids

RUNTIME = [2, 0, 3, 1]  # of the processes with distributed ids 0 to 3
own = ProcessIds(RUNTIME[index], index, (10 * index, 10 * index + 1))
assert exchange_ids(client, own, count) == [
    ProcessIds(RUNTIME[i], i, (10 * i, 10 * i + 1)) for i in range(count)
]
initialize_ids(own)
initialize_ids(ProcessIds(9, 9, ()))  # a second call does nothing
assert multihost.runtime_to_distributed_ids() == [1, 3, 0, 2]
assert [multihost.runtime_to_distributed_process_id(runtime) for runtime in range(4)] == [
    1,
    3,
    0,
    2,
]
assert multihost.distributed_to_device_ids() == [[0, 1], [10, 11], [20, 21], [30, 31]]
client.wait_at_barrier("end", 30000)
assert client.key_value_dir_get("holdfast") == []
