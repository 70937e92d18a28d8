"""Runs in the processes of tests/system/test_barriers.py."""

from __future__ import annotations

import mmap
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from barriers_start import count, index

import holdfast.multihost as multihost
from holdfast.multihost import sync_global_processes

rounds = int(sys.argv[5])
path = sys.argv[6]
NAMES = 50
THREADS = 10
with open(path, "r+b") as file:
    seen = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.int32).reshape(NAMES, count)


def work(thread, turn):
    for name in range(thread, NAMES, THREADS):
        processes = [
            None,
            {p for p in range(count) if p % 2 == index % 2},
            {p for p in range(count) if p // 4 == index // 4},
        ][name % 3]
        seen[name, index] = turn
        sync_global_processes(f"name {name}", timeout=60, processes=processes)
        with_me = sorted(processes or range(count))
        assert set(seen[name, with_me] - turn) <= {0, 1}, (name, turn, seen[name])


service_pid = sys.argv[7]


def service_bytes():
    with open(f"/proc/{service_pid}/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


with ThreadPoolExecutor(THREADS) as pool:
    for turn in range(1, rounds + 1):
        list(pool.map(lambda thread: work(thread, turn), range(THREADS)))
        if index == 0 and service_pid != "0" and turn == max(1, rounds // 10):
            first = service_bytes()
sync_global_processes("all done", timeout=60)
left = [key for key, _ in multihost.current_client().key_value_dir_get("holdfast") if "name" in key]
assert not left, left
if index == 0 and service_pid != "0":
    print(f"the service grew by {service_bytes() - first} bytes")

multihost.shutdown()
