"""Runs in the processes of tests/system/test_group.py."""

from __future__ import annotations

from group_start import client, count, group, index, no_keys_left

import holdfast.multihost as multihost
from holdfast.coordination import BarrierTimeout

if index == 1:
    client.blocking_key_value_get("go", 60000)
try:
    group.gather("save", b"x", timeout_s=2)
    raise SystemExit("no error")
except BarrierTimeout as error:
    print("caught", error.missing, error)
    assert isinstance(error, TimeoutError) and str(error).startswith("DEADLINE_EXCEEDED: ")
if index == 0:
    client.key_value_set("go", "1")
got = group.gather("save", b"y", timeout_s=30)
assert index or got == [b"y"] * count
group.barrier("before the look", timeout_s=30)
assert no_keys_left()

multihost.shutdown()
