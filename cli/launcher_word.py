"""What launchers of this machine have left in the user's folder about a job, for its page."""

from __future__ import annotations

from pathlib import Path

from holdfast.coordination.process.job_folder import launched_jobs
from holdfast.proto import session_pb2
from holdfast.web.feed import LauncherWord


def launcher_word(job_id: str) -> LauncherWord | None:
    """Returns what the launcher of a job says, or how it ended; None where neither is known."""
    jobs = launched_jobs(job_id)
    if not jobs:
        return None
    last = jobs[-1]
    log_dir = Path(last.log_dir) if last.log_dir else None
    return LauncherWord(session_pb2.Launcher(**last.launcher), log_dir)
