"""Runs in the processes of tests/system/test_faults.py."""

from __future__ import annotations

import sys

from holdfast.coordination import CoordinationClient, CoordinationError, Timeouts


def say(*words):
    """Prints a line that stays whole beside another thread's."""
    sys.stdout.write(f"{' '.join(words)}\n")
    sys.stdout.flush()


def tell(error):
    say("told", type(error).__name__, error.code)


client = CoordinationClient(
    sys.argv[3],
    int(sys.argv[1]),
    timeouts=Timeouts(heartbeat_s=3, init_s=60, shutdown_s=5),
    on_error=tell,
)
client.connect()
say("up")
try:
    client.blocking_key_value_get("end", 60_000)
    say("told nothing")
except CoordinationError as error:
    say("call ended", error.code)
client.close()
