"""A task of a step of Slurm beside another step: leaves what became of it in the folder of its
argument. Whoever joins goes on until both tasks of the other step were refused.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import jax

from holdfast import multihost
from holdfast.coordination import Fenced

folder = Path(sys.argv[1])
step = os.environ["SLURM_STEP_ID"]
rank = os.environ["SLURM_PROCID"]
try:
    multihost.initialize(heartbeat_timeout_s=8, timeout_s=60)
except (multihost.StartupFailed, Fenced) as error:
    (folder / f"refused-{step}.{rank}").write_text(str(error))
    sys.exit()
assert multihost.global_max([int(step)]) == [int(step)]
assert jax.process_index() == int(rank) and jax.process_count() == 2
spec = multihost.current_spec()
assert spec is not None
(folder / f"joined-{step}.{rank}").write_text(f"{spec.job_id} {spec.attempt}")
while len(list(folder.glob("refused-*"))) < int(sys.argv[2]):
    time.sleep(0.1)
multihost.shutdown()
