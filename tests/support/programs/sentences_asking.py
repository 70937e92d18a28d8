"""Runs in the processes of tests/system/test_sentences.py."""

from __future__ import annotations

import json
import sys
import threading

from jax._src.lib import _jax

address = sys.argv[3]
count = 3
found = {}
if sys.argv[4] == "jaxlib":
    service = _jax.get_distributed_runtime_service(
        address, count, heartbeat_timeout=100, shutdown_timeout=5
    )
clients = [
    _jax.get_distributed_runtime_client(
        address,
        index,
        init_timeout=60,
        shutdown_timeout=5,
        heartbeat_timeout=100,
        missed_heartbeat_callback=print,
        shutdown_on_destruction=False,
    )
    for index in range(count)
]
threads = [threading.Thread(target=client.connect) for client in clients]
[thread.start() for thread in threads], [thread.join() for thread in threads]
first, second, third = clients


def note(what, call):
    try:
        call()
    except Exception as error:
        found[what] = str(error)


note("try_get", lambda: first.key_value_try_get("nope/x"))
first.key_value_set("a", "abc")
note("set", lambda: first.key_value_set("a", "2"))
note("increment", lambda: first.key_value_increment("a", 1))
note("barrier", lambda: first.wait_at_barrier("b1", 300))
note("replay", lambda: second.wait_at_barrier("b1", 300))
note("outsider", lambda: first.wait_at_barrier("b2", 300, [1, 2]))
note("unknown", lambda: first.wait_at_barrier("b4", 300, [0, 7]))
note("twice", lambda: first.wait_at_barrier("b5", 300, [0, 0, 1]))
note("live", lambda: first.get_live_nodes([1, 2]))
note("late get", lambda: first.blocking_key_value_get("none", 200))
print("found", json.dumps(found), flush=True)
import os

os._exit(0)  # without the shutdown barrier, which this is not about
