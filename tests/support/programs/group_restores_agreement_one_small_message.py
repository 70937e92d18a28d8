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
    for read_once in (False, True):
        group.calls.clear()
        manager.restore(1, shards(0), read_once=read_once)
        agreements = ["gather", "broadcast"] * (1 + read_once)
        assert [name for name, _ in group.calls] == [
            "broadcast",
            *agreements,
        ], group.calls  # the record comes first
        assert all(len(args[1] or b"") < 200 for _, args in group.calls[1:]), group.calls
