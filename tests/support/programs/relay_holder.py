"""Starts a relay and waits to be killed: argv[3:] are the coordinator's address and credentials."""

from __future__ import annotations

import signal
import sys

from holdfast.coordination import Credentials, Relay

relay = Relay.spawn(sys.argv[3], Credentials(*sys.argv[4:]), [0])
print("address", relay.address, flush=True)
signal.pause()
