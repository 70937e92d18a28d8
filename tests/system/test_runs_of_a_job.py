"""A job that is run again under its name, its steps in a bucket."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from holdfast.launch import RestartPolicy, RunSettings, run_local
from tests.support.cluster import CollectedOutput
from tests.support.object_servers import BUCKET, s3_server

_TRAINER = """
import os, sys
import numpy as np
from holdfast import checkpoint, multihost

multihost.initialize()
with checkpoint.CheckpointManager(sys.argv[1]) as manager:
    step = (manager.latest_step() or 0) + 1
    manager.save(step, {"w": np.full(3, step)}).wait()
    if os.environ.get("DIES"):
        os._exit(93 if step == 3 else 1)
print("saved", step)
multihost.shutdown()
"""


def _env(dies: bool) -> dict[str, str]:
    return os.environ | {"JAX_PLATFORMS": "cpu"} | ({"DIES": "1"} if dies else {})


@pytest.mark.slow
def test_a_run_after_one_that_died_in_a_later_attempt(tmp_path: Path) -> None:
    """It begins with attempt 1, goes on from the last step, and takes the claim of the run before,
    which is not a day old, away.
    """
    program = tmp_path / "trainer.py"
    program.write_text(_TRAINER)
    with s3_server() as query:
        command = [sys.executable, str(program), f"s3://{BUCKET}/runs{query}"]
        restart = RestartPolicy(max_failures=2, backoff_s=0)
        first = run_local(command, 1, RunSettings(job_id="named", restart=restart, env=_env(True)))
        assert (first.outcome, first.attempts, first.saved_step) == ("failed", 3, 3)
        output = CollectedOutput()
        again = run_local(command, 1, RunSettings(job_id="named", env=_env(False)), output=output)
        assert (again.outcome, again.attempts) == ("done", 1), output.lines
        assert any(text == "saved 4" for _, text in output.lines)
