"""Runs in the processes of tests/system/test_group_saves.py."""

from __future__ import annotations

import threading
import time

from joined import index, root
from sharded_state import state

from holdfast.checkpoint import CheckpointManager, Options

gate = threading.Event()
entered = threading.Event()


def progress(seen):
    entered.set()
    assert gate.wait(60)


options = Options(on_busy="skip", progress=None if index else progress)
with CheckpointManager(root, options=options) as manager:
    step = 0
    saved = []
    skipped = 0
    while step < 20_000 and len(saved) < 3:
        if manager.save(step, state(step)):
            saved.append(step)
        elif entered.is_set() and not gate.is_set():
            skipped += 1
        if skipped == 100:
            gate.set()
        step += 1
        time.sleep(0.002)
    manager.wait_until_finished()
    assert saved == manager.all_steps() and len(saved) == 3, (saved, manager.all_steps())
    assert index or (skipped == 100 and saved[1] - saved[0] > 100), (skipped, saved)
    assert manager.save(30_000, state(7), force=True)
    manager.wait_until_finished()
    assert manager.latest_step() == 30_000
    print("saved", saved)
