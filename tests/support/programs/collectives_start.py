"""What programs of tests/system/test_collectives.py begin with."""

from __future__ import annotations

import sys

import holdfast.multihost as multihost

index = int(sys.argv[1])
count = int(sys.argv[2])
port = sys.argv[3]
multihost.initialize(f"127.0.0.1:{port}", count, index, timeout_s=60, heartbeat_timeout_s=4)
