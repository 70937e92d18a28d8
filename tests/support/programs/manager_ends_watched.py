"""Ends right after it has begun a save that takes longer than `hang_timeout_s`, or drops its
manager and goes on for as long.
"""

import sys
import time

import numpy as np

from holdfast.checkpoint import CheckpointManager, Options
from tests.support.told_stores import told_url

LONG_S = 2.5


def before(verb: str, name: str, end_s: float) -> None:
    """Takes its time for the record."""
    if verb == "commit" and name.endswith("checkpoint.json"):
        time.sleep(LONG_S)


options = Options(hang_timeout_s=1, hang_exit=True)
manager = CheckpointManager(told_url(sys.argv[3], before), options=options)
manager.save(7, {"w": np.ones(3)})
if sys.argv[4] == "drop":
    manager.wait_until_finished()
    del manager
    time.sleep(LONG_S)
