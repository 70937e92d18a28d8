"""Trains until it is told to stop, or, as `python task_stops.py hears_nothing`, to its own end once
a notice is there, for which it never asks.
"""

from __future__ import annotations

import itertools
import sys
import time

from holdfast import multihost
from holdfast.multihost.preemption.preemption import has_notice

multihost.initialize()
print("here", flush=True)
if sys.argv[1] == "stops":
    for step in itertools.count():
        if multihost.reached_preemption(step):
            break
        time.sleep(0.01)
else:
    while not has_notice():
        time.sleep(0.01)
