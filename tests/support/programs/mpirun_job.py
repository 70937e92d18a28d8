"""A process that mpirun starts: leaves what it knows of the job in the folder of its argument."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jax

from holdfast import multihost

multihost.initialize()
largest = multihost.global_max([jax.process_index()])[0]
index = jax.process_index()
count = jax.process_count()
text = f"{index} {count} {largest} {os.environ['HOLDFAST_COORDINATOR']}\n"
(Path(sys.argv[1]) / os.environ["HOLDFAST_PROCESS_ID"]).write_text(text)
multihost.shutdown()
