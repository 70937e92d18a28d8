"""Runs in the processes of tests/system/test_group.py."""

from __future__ import annotations

import os
import signal

from group_start import client, group, index

import holdfast.multihost as multihost
from holdfast.coordination import ProcessLost

group.barrier("start", timeout_s=30)
if index == 2:
    client.key_value_set_bytes("holdfast/gather/save/0/2", b"two")
    os.kill(os.getpid(), signal.SIGKILL)
try:
    got = group.gather("save", str(index).encode(), timeout_s=40)
    assert index == 0 and got == [b"0", b"1", b"two"], got
    assert client.key_value_dir_get("holdfast/gather/save") == []
    print("complete")
except ProcessLost as error:
    assert index == 1 and error.process == 2, error
    print("heard of", error.process)
os._exit(0)

multihost.shutdown()
