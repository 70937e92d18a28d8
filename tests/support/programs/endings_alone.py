"""The one process of a job of tests/system/test_endings.py: saves step 1, and fails."""

from __future__ import annotations

import sys

import numpy as np

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager

multihost.initialize()
with CheckpointManager(sys.argv[1]) as manager:
    manager.save(1, {"w": np.arange(8)})
sys.exit(3)
