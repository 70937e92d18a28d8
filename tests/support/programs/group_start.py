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
address = f"127.0.0.1:{port}"
if which == "jaxlib":
    jax.distributed.initialize(address, count, index, coordinator_bind_address=address)
else:
    multihost.initialize(address, count, index, timeout_s=60)
client = multihost.current_client()
group = default_group()


def no_keys_left():
    return [
        key
        for key, _ in client.key_value_dir_get("holdfast")
        if "/sync/" not in key and "/progress/" not in key
    ] == []
