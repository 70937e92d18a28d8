"""Launches more processes than it may open pipes for: `launched_half_way.py`."""

from __future__ import annotations

import resource

from holdfast.launch import RestartPolicy, RunSettings, run_local

COUNT = 60
limit = COUNT + 64  # enough for the coordinator
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
policy = RestartPolicy(max_startup_failures=0, grace_s=0.5)
command = ["sh", "-c", "echo pid $$; exec sleep 600"]
result = run_local(command, COUNT, RunSettings(restart=policy))
print(result.outcome, result.exit_code, result.error)
