"""Runs in the processes of tests/system/test_group_restores.py."""

from __future__ import annotations

from group_restores_start import Counted, shards
from joined import root

from holdfast.checkpoint import CheckpointManager
from holdfast.multihost import default_group

group = Counted(default_group())
with CheckpointManager(root, group=group) as manager:
    manager.save(1, shards(1))
    manager.wait_until_finished()
    for read, agreements in (("each", 1), ("once", 3)):
        group.calls.clear()
        manager.restore(1, shards(0), read=read)
        assert [name for name, _ in group.calls] == [
            "broadcast",
            *["gather", "broadcast"] * agreements,
        ], group.calls  # the record comes first
        assert all(len(args[1] or b"") < 1000 for _, args in group.calls[1:]), group.calls
