"""Runs in the processes of tests/system/test_group.py."""

from __future__ import annotations

from group_start import client, index

import holdfast.multihost as multihost
from holdfast.multihost import ClusterGroup

members = [0, 3] if index in (0, 3) else [1, 2]
half = ClusterGroup(client, members.index(index), 2, processes=members)
for _ in range(5):
    got = half.gather("x", str(index).encode(), timeout_s=30)
    assert got == ([str(i).encode() for i in members] if half.index == 0 else None)
    assert (
        half.broadcast("x", b"from %d" % index if half.index == 0 else None, timeout_s=30)
        == b"from %d" % members[0]
    )
    half.barrier("x", timeout_s=30)

multihost.shutdown()
