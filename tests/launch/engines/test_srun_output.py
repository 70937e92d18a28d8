"""What the engine of Slurm reads of srun's output, by a stand-in for srun: it labels the lines of
its one task as srun does.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from holdfast.launch.engines.slurm import SlurmSettings, run_slurm
from holdfast.launch.supervisor.job import RestartPolicy
from tests.support.cluster import CollectedOutput
from tests.support.launchers import SLURM

SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
"$@" 2>&1 | sed --unbuffered 's/^/0: /'
"""


def test_a_line_that_overwrites_itself_keeps_its_task(tmp_path: Path) -> None:
    """A progress bar, which ends without a newline, is its process's, and hides not how the task
    has ended. The end of srun is waited for, for as long as one likes.
    """
    srun = tmp_path / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    one = {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    output = CollectedOutput()
    result = run_slurm(
        ["printf", r"first\rlast\n\rstep 1\rstep 2"],
        SlurmSettings(restart=RestartPolicy(grace_s=math.inf), insecure=True, requeue=False),
        os.environ | SLURM | one | {"SLURM_NNODES": "1", "PATH": path},
        output=output,
    )
    assert result.outcome == "done", output.text
    assert output.lines == [(0, "last"), (0, "step 2")]
