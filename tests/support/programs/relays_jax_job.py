"""Runs in the processes of tests/system/test_relays.py."""

from __future__ import annotations

import sys

index = int(sys.argv[1])
count = int(sys.argv[2])
coordinator = sys.argv[3]
from holdfast.coordination import CoordinationClient, Credentials, JobIdentity, Relay, Timeouts

credentials = Credentials(*sys.argv[4:])
with (
    Relay.spawn(coordinator, credentials, [index]) as relay,
    CoordinationClient(
        coordinator,
        index,
        job=JobIdentity(num_processes=count),
        timeouts=Timeouts(init_s=60),
        credentials=credentials,
    ) as client,
):
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    jax.distributed.initialize(
        relay.address,
        count,
        index,
        coordinator_bind_address="127.0.0.1:0",
        heartbeat_timeout_seconds=86400,
    )
    assert jax.process_count() == count and jax.device_count() == count
    multihost_utils.sync_global_devices("here")
    assert multihost_utils.broadcast_one_to_all(np.int32(7 + index)) == 7
    assert multihost_utils.process_allgather(np.int32([index])).ravel().tolist() == list(
        range(count)
    )
    client.wait_at_barrier("holdfast/own", 30_000)
    client.key_value_set(f"holdfast/{index}", "x")
    theirs = jax._src.distributed.global_state.client
    client.wait_at_barrier("holdfast/set", 30_000)
    assert len(theirs.key_value_dir_get("holdfast")) == count
    jax.distributed.shutdown()
print("done", flush=True)
