"""Runs in the processes of tests/system/test_local_tier.py."""

from __future__ import annotations

import sys
import time

from local_tier_start import go_on, manager
from sharded_state import state

begin = go_on() + 1
known: list[int] = []
count_known = 0
for step in range(begin, begin + int(sys.argv[7])):
    manager.save(step, state(step))
    if manager.local_steps() != known:
        known = manager.local_steps()
        count_known = count_known + 1
        print(f"acknowledged {count_known}:", *known, flush=True)
    time.sleep(0.01)
manager.wait_until_finished()
print("local", *manager.local_steps(), flush=True)
manager.close()
