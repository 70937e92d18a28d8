"""Runs in the processes of tests/system/test_group.py."""

from __future__ import annotations

from group_start import count, group, index, no_keys_left

import holdfast.multihost as multihost

assert (group.index, group.count) == (index, count)
for turn in range(30):
    got = group.gather("same/name", f"{index}:{turn}".encode(), timeout_s=30)
    assert got == ([f"{i}:{turn}".encode() for i in range(count)] if index == 0 else None), got
    got = group.broadcast("same/name", str(turn).encode() if index == 0 else None, timeout_s=30)
    assert got == str(turn).encode()
    group.barrier("same/name", timeout_s=30)
got = group.gather("big", bytes([index]) * (9 << 20), timeout_s=60)
assert index or [len(value) for value in got] == [9 << 20] * count
assert group.gather("", b"", timeout_s=30) == ([b""] * count if index == 0 else None)
group.barrier("before the look", timeout_s=30)
assert no_keys_left()
group.report(step=3)

multihost.shutdown()
