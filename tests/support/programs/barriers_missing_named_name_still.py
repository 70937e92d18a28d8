"""Runs in the processes of tests/system/test_barriers.py."""

from __future__ import annotations

import time

from barriers_start import index

import holdfast.multihost as multihost
from holdfast.coordination import BarrierTimeout
from holdfast.multihost import sync_global_processes

client = multihost.current_client()
multihost.default_group().report(step=40 + index)
sync_global_processes("reported", timeout=60)
if index == 2:
    client.blocking_key_value_get("late", 60000)
start = time.monotonic()
try:
    sync_global_processes("epoch", timeout=2)
except BarrierTimeout as error:
    assert isinstance(error, TimeoutError), error
    print(
        "missing",
        error.missing,
        "name",
        error.name,
        "in time",
        time.monotonic() - start < 10,
        str(error).replace(chr(10), " "),
    )
if index == 0:
    client.key_value_set("late", "now")
sync_global_processes("epoch", timeout=30)

multihost.shutdown()
