"""What launchers of this machine have left in the user's folder about a job, for its page."""

from __future__ import annotations

from pathlib import Path

from holdfast.coordination.process.job_folder import ended_jobs, launched_job
from holdfast.proto import session_pb2
from holdfast.web.feed import LauncherWord


def launcher_word(job_id: str) -> LauncherWord | None:
    """Returns what the launcher of a job says, or how it ended; None where neither is known."""
    job = launched_job(job_id)
    if job is not None:
        log_dir = Path(job.log_dir) if job.log_dir else None
        return LauncherWord(session_pb2.Launcher(**job.launcher), log_dir)
    ended = [each for each in ended_jobs() if each.job_id == job_id]
    if not ended:
        return None
    last = ended[-1]
    ended_as = session_pb2.Launcher(state=last.outcome, why=last.reason, attempt=last.attempt)
    return LauncherWord(ended_as)
