"""Runs the ordinary program of jax behind a relay: argv[4:] are credentials."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from holdfast.coordination import Credentials, Relay

relay = Relay.spawn(sys.argv[3], Credentials(*sys.argv[4:]), [int(sys.argv[1])])
sys.argv[3:] = [relay.address]
runpy.run_path(str(Path(__file__).with_name("jax_program.py")), run_name="__main__")
relay.close()
