"""Runs in the processes of tests/system/test_conformance.py."""

from __future__ import annotations

import socket
import sys

from jax._src.lib import _jax

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{probe.getsockname()[1]}"
recoverable = sys.argv[1] == "recoverable"
heartbeat_s = int(sys.argv[2])
service = _jax.get_distributed_runtime_service(
    address, 3, heartbeat_timeout=heartbeat_s, shutdown_timeout=10, recoverable=recoverable
)
print("coordinator at", address, flush=True)
sys.stdin.read()
