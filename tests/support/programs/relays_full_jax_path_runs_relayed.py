"""Runs in the processes of tests/system/test_relays.py."""

from __future__ import annotations

import sys

from holdfast.coordination import Credentials, Relay

relay = Relay.spawn(sys.argv[3], Credentials(*sys.argv[4:]), [int(sys.argv[1])])
sys.argv[3:] = [relay.address]
