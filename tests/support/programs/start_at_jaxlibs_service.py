"""Comes to the address of a job of jax.distributed's, as initialize() and as a launcher do."""

from __future__ import annotations

import sys

from starting import count, index

from holdfast import multihost

address = sys.argv[3]
launched = multihost.ProcessSpec(process_id=index, num_processes=count, coordinator=address)
for attempt in (
    lambda: multihost.initialize(address, count, index, timeout_s=30),
    lambda: multihost.initialize(spec=launched, timeout_s=30),
):
    try:
        attempt()
    except multihost.StartupFailed as error:
        print("refused:", error, flush=True)
