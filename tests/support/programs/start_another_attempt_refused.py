"""Runs in the processes of tests/system/test_start.py."""

from __future__ import annotations

import starting  # noqa: F401

import holdfast.multihost as multihost
from holdfast.coordination import CoordinationError

try:
    multihost.initialize(timeout_s=20)
except CoordinationError as error:
    print("refused:", error)
