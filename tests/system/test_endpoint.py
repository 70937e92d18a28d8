"""ENV-5: the coordinator's endpoint belongs to one (job, attempt); a worker of an earlier one is
refused, wherever it knocks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from holdfast.launch import JobResult, RestartPolicy, RunSettings, run_local
from tests.support.cluster import CollectedOutput
from tests.support.paths import program

WORKER = program("endpoint_worker")

LATE = program("endpoint_late")


def late_worker(env: dict[str, str]) -> str:
    base = {
        key: value for key, value in os.environ.items() if not key.startswith(("HOLDFAST_", "JAX_"))
    }
    done = subprocess.run(
        [sys.executable, str(LATE)],
        env=base | {"JAX_PLATFORMS": "cpu"} | env,
        capture_output=True,
        text=True,
        timeout=80,
        check=True,
    )
    return done.stdout


@pytest.mark.slow
def test_a_worker_never_joins_the_next_attempt(tmp_path: Path) -> None:
    """Started late, it finds nobody at its own endpoint and is refused at that of attempt 2, which
    ends as if it had never been there.
    """
    results: list[JobResult] = []
    output = CollectedOutput()
    policy = RestartPolicy(max_failures=1, backoff_s=0.05, grace_s=1)
    settings = RunSettings(restart=policy, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    command = [sys.executable, str(WORKER), str(tmp_path)]
    job = threading.Thread(
        target=lambda: results.append(run_local(command, 2, settings, output=output))
    )
    job.start()
    try:
        while not (tmp_path / "joined").exists() and job.is_alive():
            job.join(0.05)
        assert job.is_alive(), output.text
        stale = (
            json.loads((tmp_path / "env.1.1").read_text())
            if (tmp_path / "env.1.1").exists()
            else None
        )
        stale = stale or json.loads((tmp_path / "env.1.0").read_text()) | {
            "HOLDFAST_PROCESS_ID": "1"
        }
        living = json.loads((tmp_path / "env.2.1").read_text())
        assert stale["HOLDFAST_COORDINATOR"] != living["HOLDFAST_COORDINATOR"]
        assert late_worker(stale).startswith(("CoordinatorLost", "StartupTimeout", "StartupFailed"))
        redirected = stale | {
            key: living[key] for key in ("HOLDFAST_COORDINATOR", "JAX_COORDINATOR_ADDRESS")
        }
        assert late_worker(redirected).startswith("Fenced")
    finally:
        (tmp_path / "over").touch()
        job.join()
    assert (results[0].outcome, results[0].attempts) == ("done", 2)
    assert output.text.count("largest 1") == 2, output.text
