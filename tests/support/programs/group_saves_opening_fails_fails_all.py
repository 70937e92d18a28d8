"""Runs in the processes of tests/system/test_group_saves.py."""

from __future__ import annotations

from joined import root
from sharded_state import goes

from holdfast.checkpoint import CheckpointError, CheckpointManager

goes(lambda: CheckpointManager(root), CheckpointError)
