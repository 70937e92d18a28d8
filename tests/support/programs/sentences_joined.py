"""Runs in the processes of tests/system/test_sentences.py."""

from __future__ import annotations

import sys
import threading

from jax._src.lib import _jax

options = {
    "init_timeout": 60,
    "shutdown_timeout": 5,
    "heartbeat_timeout": 100,
    "shutdown_on_destruction": False,
}
clients = [_jax.get_distributed_runtime_client(sys.argv[3], index, **options) for index in range(2)]
threads = [threading.Thread(target=client.connect) for client in clients]
[thread.start() for thread in threads], [thread.join() for thread in threads]
print("joined", flush=True)
sys.stdin.read()
