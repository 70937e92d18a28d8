"""Runs in the processes of tests/system/test_accelerator.py."""

from __future__ import annotations

import accelerator_start  # noqa: F401

from holdfast import multihost

multihost.sync_global_processes("here", timeout=60)
assert multihost.global_max([3, -1], timeout_s=60) == [3, -1]
