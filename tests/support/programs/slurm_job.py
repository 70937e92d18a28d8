"""Runs a command as the tasks of this Slurm allocation, and leaves how that ended as JSON:
`slurm_job.py FILE SPARES POLICY COMMAND...`; the policy is JSON, too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from holdfast.launch import RestartPolicy, SlurmSettings, run_slurm

if __name__ == "__main__":
    left, spares, policy, *command = sys.argv[1:]
    settings = SlurmSettings(
        restart=RestartPolicy(**json.loads(policy)),
        host="127.0.0.1",
        requeue=False,
        heartbeat_timeout_s=10,
        spares=int(spares),
    )
    result = run_slurm(command, settings)
    whole = Path(left).with_suffix(".new")
    whole.write_text(json.dumps(result.as_json()))
    whole.replace(left)
    sys.exit(result.exit_code)
