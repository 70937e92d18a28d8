"""Runs in the processes of tests/system/test_duels.py."""

from __future__ import annotations

import signal
import sys
import threading

import numpy as np

from holdfast.checkpoint import CheckpointManager
from holdfast.coordination import Fenced

root = sys.argv[1]
steps = int(sys.argv[2])
where = ["write", "commit"]
for step in range(steps):
    manager = CheckpointManager(root)
    verb = where[step % 2]
    do = getattr(manager._root.storage, verb)

    def paused(*args, **options):
        if verb == "write":
            do(*args, **options)
        # To this very thread: sent to the process, another thread may take it while this one runs
        # on.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        if verb == "commit":
            do(*args, **options)

    setattr(manager._root.storage, verb, paused)
    manager.save(step, {"who": np.zeros(1000)})
    try:
        manager.close()
        print("not fenced", flush=True)
    except Fenced:
        print("fenced", flush=True)
