"""Runs in the processes of tests/system/test_endpoint.py."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
attempt = os.environ["HOLDFAST_ATTEMPT"]
me = os.environ["HOLDFAST_PROCESS_ID"]
mine = {key: value for key, value in os.environ.items() if key.startswith(("HOLDFAST_", "JAX_"))}
whole = folder / f".{attempt}.{me}"
whole.write_text(json.dumps(mine))
whole.rename(folder / f"env.{attempt}.{me}")
if attempt == "1":
    sys.exit(1)
import jax

from holdfast import multihost

multihost.initialize()
if me == "0":
    (folder / "joined").touch()
    while not (folder / "over").exists():
        time.sleep(0.02)
total = multihost.global_max([jax.process_index()])[0]
multihost.shutdown()
print("largest", total, flush=True)
