"""Waits for a process that is killed meanwhile: argv[4] is who, argv[5] what is waited in."""

from __future__ import annotations

import sys
import time

import numpy as np
from collectives_start import index

import holdfast.multihost as multihost
from holdfast.coordination import CoordinationError

victim = int(sys.argv[4])


def blocking_get() -> None:
    own = b"" if index == 0 else None
    multihost.default_group().broadcast("far", own, timeout_s=60)


WAITS = {
    "barrier": lambda: multihost.sync_global_processes("far", timeout=60),
    "blocking get": blocking_get,
    "gather": lambda: multihost.default_group().gather("far", b"", timeout_s=60),
    "broadcast": lambda: multihost.broadcast_one_to_all(
        np.arange(4), is_source=index == 3, timeout_s=60
    ),
    "global_max": lambda: multihost.global_max([index], timeout_s=60),
}

multihost.global_max([index])
multihost.sync_global_processes("near")
print("ready", flush=True)
if index == victim:
    time.sleep(60)
try:
    WAITS[sys.argv[5]]()
except CoordinationError as error:
    words = ["lost", getattr(error, "process", None), "at", time.time(), error]
    # In one write: other threads log.
    print(" ".join(map(str, words)) + "\n", end="", flush=True)
