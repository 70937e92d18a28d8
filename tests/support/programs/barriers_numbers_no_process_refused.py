"""Runs in the processes of tests/system/test_barriers.py."""

from __future__ import annotations

import sys
import time

import holdfast.multihost as multihost

index = int(sys.argv[1])
count = int(sys.argv[2])
port = sys.argv[3]
multihost.initialize(f"127.0.0.1:{port}", count, index, timeout_s=60)


def refused(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except ValueError as error:
        assert "the job has 2" in str(error) and "0 to 1" in str(error), error
        return True


assert refused(multihost.sync_global_processes, "x", processes={index, 9})
assert refused(multihost.get_barrier_sync_fn, processes={index, -1})
assert refused(multihost.live_processes, [index, 9])
assert refused(multihost.runtime_to_distributed_process_id, 9)
if index == 0:
    begun_s = time.monotonic()
    try:
        multihost.sync_global_processes("alone", timeout=0)
        raise SystemExit("somebody came")
    except TimeoutError as error:
        assert error.missing == (1,) and time.monotonic() - begun_s < 30
multihost.shutdown()
