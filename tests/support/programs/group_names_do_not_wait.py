"""Runs in the processes of tests/system/test_group.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from group_start import count, group, index

import holdfast.multihost as multihost

names = [f"n{i}" for i in range(6)] * 5
order = names if index % 2 else names[::-1]
with ThreadPoolExecutor(10) as pool:
    got = list(
        pool.map(
            lambda name: (name, group.gather(name, f"{name}.{index}".encode(), timeout_s=60)), order
        )
    )
if index == 0:
    assert all(values == [f"{name}.{i}".encode() for i in range(count)] for name, values in got), (
        got
    )

multihost.shutdown()
