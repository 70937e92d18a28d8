"""Forks while the client of a job is idle or has just asked: each child ends at once.

argv: index, count, address.
"""

from __future__ import annotations

import os
import sys
import time
import warnings

from holdfast.coordination import CoordinationClient

# Since 3.12 Python warns of each fork of a process with threads, as gRPC's.
warnings.simplefilter("ignore", DeprecationWarning)

with CoordinationClient(sys.argv[3], 0) as client:
    for number in range(200):
        time.sleep(number % 6 * 0.002)
        if number % 5 == 4:
            client.process_info()
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
    assert (client.statistics()["breaks"], client.statistics()["reconnects"]) == (0, 0)
print("all have ended")
