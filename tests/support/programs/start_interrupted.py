"""Process 0 is interrupted while it waits in shutdown(); process 1 still needs it."""

from __future__ import annotations

import os
import signal
import sys
import time

from starting import count, index

import holdfast.multihost as multihost
from holdfast.coordination import ProcessLost, StatusClient

multihost.initialize(sys.argv[3], count, index, timeout_s=60, heartbeat_timeout_s=60)
if index == 1:
    with StatusClient(sys.argv[3]) as client:
        while "leaving" not in (task := client.status().tasks[0]).progress.values:
            time.sleep(0.1)
    os.kill(task.pid, signal.SIGINT)
    try:
        multihost.sync_global_processes("far", timeout=50)
    except ProcessLost as error:
        print(error)
    sys.exit()
try:
    multihost.shutdown()
except KeyboardInterrupt:
    assert not multihost.is_jax_distributed_client_initialized()
    assert multihost.current_spec() is None
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    print("out")
