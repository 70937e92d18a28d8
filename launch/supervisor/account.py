"""What a launcher tells the coordinator of its job, for the status."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.multihost import Preempted
from holdfast.proto import session_pb2

from .goodput import Goodput
from .job import Decision, State


@dataclass(frozen=True)
class Account:
    """How the job is by its launcher's own knowledge, and where its time went."""

    launcher: session_pb2.Launcher = field(default_factory=session_pb2.Launcher)
    goodput: Goodput = field(default_factory=Goodput)


@dataclass(frozen=True)
class Errand:
    """What a launcher was asked to run, where, and when."""

    command: Sequence[str] = ()
    folder: str = ""
    began_unix_s: float = 0.0

    def launcher(self, decision: Decision) -> session_pb2.Launcher:
        """Returns what the coordinator is told after a decision."""
        job = decision.job
        preempted = job.final and isinstance(job.error, Preempted)
        return session_pb2.Launcher(
            state="preempted" if preempted else str(job.state),
            why=decision.reason,
            waiting_for=job.why_waiting if job.state is State.SCHEDULING else "",
            command=shlex.join(self.command),
            folder=self.folder,
            began_unix_s=self.began_unix_s,
            attempt=job.attempt,
        )
