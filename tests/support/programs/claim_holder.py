"""Takes a claim, forks if told to, prints the writer's id, and waits to be killed."""

from __future__ import annotations

import os
import signal
import sys

from holdfast.checkpoint.steps.claims import this_writer
from holdfast.checkpoint.steps.local_claims import LocalClaims
from holdfast.checkpoint.storage.local import LocalStorage

folder = LocalStorage(sys.argv[1]).posix
assert folder is not None
writer = this_writer()
claims = LocalClaims(folder)  # it holds the lock as long as it lives
claims.take(writer)
if sys.argv[2] == "fork":
    forked, ready = os.pipe()
    if os.fork() == 0:
        os.write(ready, b"!")
        signal.pause()
    os.read(forked, 1)  # the child has let go of the lock
print(writer.id, flush=True)
signal.pause()
