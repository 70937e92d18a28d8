"""What programs of tests/system/test_group.py begin with."""

from __future__ import annotations

import sys

import jax

import holdfast.multihost as multihost
from holdfast.multihost import default_group

index = int(sys.argv[1])
count = int(sys.argv[2])
port = sys.argv[3]
which = sys.argv[4]
heartbeat_timeout_s = float(sys.argv[5]) if len(sys.argv) > 5 else None
address = f"127.0.0.1:{port}"
if which == "jaxlib":
    jax.distributed.initialize(address, count, index, coordinator_bind_address=address)
elif heartbeat_timeout_s is None:
    multihost.initialize(address, count, index, timeout_s=60)
else:
    multihost.initialize(
        address, count, index, timeout_s=60, heartbeat_timeout_s=heartbeat_timeout_s
    )
client = multihost.current_client()
group = default_group()


def no_keys_left():
    return [
        key
        for key, _ in client.key_value_dir_get("holdfast")
        if "/sync/" not in key and "/progress/" not in key
    ] == []
