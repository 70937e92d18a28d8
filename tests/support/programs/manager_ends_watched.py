"""Ends right after it has begun a save that takes longer than `hang_timeout_s`, or drops its
manager and goes on for as long.
"""

import sys
import time

import numpy as np

from holdfast.checkpoint import CheckpointManager, Options

LONG_S = 2.5


def pass_on(progress: object) -> None:
    """Takes its time, and so does the save."""
    time.sleep(LONG_S)


options = Options(hang_timeout_s=1, hang_exit=True, progress=pass_on)
manager = CheckpointManager(sys.argv[3], options=options)
manager.save(7, {"w": np.ones(3)})
if sys.argv[4] == "drop":
    manager.wait_until_finished()
    del manager
    time.sleep(LONG_S)
