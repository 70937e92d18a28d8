"""Runs in the processes of tests/system/test_endpoint.py."""

from __future__ import annotations

from holdfast import coordination, multihost

try:
    multihost.initialize(timeout_s=5)
    print("joined")
except (coordination.CoordinationError, multihost.JobError) as error:
    print(type(error).__name__, error)
