"""Runs in the processes of tests/system/test_jax_versions.py."""

from __future__ import annotations

import sys

import jax
from jax._src import distributed

index = int(sys.argv[1]) + int(sys.argv[4])
count = int(sys.argv[5])
address = sys.argv[3]
jax.distributed.initialize(address, count, index)
client = distributed.global_state.client
client.key_value_set(f"from/{index}", jax.__version__)
versions = [client.blocking_key_value_get(f"from/{each}", 30_000) for each in range(count)]
assert len({version.rsplit(".", 1)[0] for version in versions}) == 2, versions
for step in range(20):
    client.wait_at_barrier(f"step/{step % 3}", 30_000)
client.wait_at_barrier(f"pair {index % 2}", 30_000, [index % 2, index % 2 + 2])
assert sorted(client.get_live_nodes(list(range(count)))) == list(range(count))
assert len(client.key_value_dir_get("from/")) == count
print("together with", versions)
jax.distributed.shutdown()
