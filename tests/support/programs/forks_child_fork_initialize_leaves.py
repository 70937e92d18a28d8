"""Runs in the processes of tests/system/test_forks.py."""

from __future__ import annotations

import signal
import sys

from forks_start import fork, reap, unharmed

import holdfast.multihost as multihost

count = 2
index = 1 if len(sys.argv) > 4 else 0
if index == 0:
    children = []
    signal.signal(signal.SIGUSR1, lambda number, frame: children.append(fork(lambda: None)))
multihost.initialize(sys.argv[3], count, index, timeout_s=60)
if index == 0:
    reap(children[0])
unharmed(count)
multihost.shutdown()
