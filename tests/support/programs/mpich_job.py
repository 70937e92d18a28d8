"""A process that mpiexec starts: leaves who it is in the folder of its argument."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jax

from holdfast import multihost

multihost.initialize()
largest = multihost.global_max([jax.process_index()])[0]
spec = multihost.current_spec()
where = "alone" if spec is None else f"{spec.job_id} {spec.coordinator}"
text = f"{jax.process_index()} {jax.process_count()} {largest} {where}"
(Path(sys.argv[1]) / os.environ["PMI_RANK"]).write_text(text)
multihost.shutdown()
