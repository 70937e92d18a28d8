"""Runs in the processes of tests/system/test_start.py."""

from __future__ import annotations

import sys

import starting  # noqa: F401

import holdfast.multihost as multihost
from holdfast.coordination import CoordinatorLost

try:
    multihost.initialize(sys.argv[3], 2, 1, timeout_s=2)
except CoordinatorLost as error:
    print("lost", error.address, error.tried_s > 0, error)
