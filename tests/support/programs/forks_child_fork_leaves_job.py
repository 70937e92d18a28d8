"""Runs in the processes of tests/system/test_forks.py."""

from __future__ import annotations

import os
import sys

from forks_start import fork, reap, unharmed
from starting import count, index

import holdfast.multihost as multihost
from holdfast.coordination import CoordinationError

multihost.initialize(sys.argv[3], count, index, timeout_s=60)
client = multihost.current_client()


def work():
    assert not multihost.is_initialized()
    try:
        multihost.current_client()
        os._exit(7)
    except ValueError:
        pass
    try:
        client.key_value_set("from", "a child")
        os._exit(8)
    except CoordinationError as error:
        assert (
            "was forked from the one that connected" in str(error)
            and error.code == "FAILED_PRECONDITION"
        )
    client.close()


if index == 0:
    for _ in range(3):
        reap(fork(work))
unharmed()
assert client.key_value_dir_get("from") == []
multihost.shutdown()
