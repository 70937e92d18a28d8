"""What a launcher tells the coordinator of its job, for the status."""

from __future__ import annotations

import shlex
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.coordination.diagnosis.summary import printable
from holdfast.coordination.process.job_folder import working_folder
from holdfast.proto import session_pb2

from .goodput import Goodput
from .job import Decision, Job, State

MOST_ATTEMPTS = 20
"""Of so many of the newest attempts the status knows who stayed."""
_MOST_NAMED = 32  # processes of an attempt


@dataclass(frozen=True)
class Account:
    """How the job is by its launcher's own knowledge, and where its time went."""

    launcher: session_pb2.Launcher = field(default_factory=session_pb2.Launcher)
    goodput: Goodput = field(default_factory=Goodput)


class AttemptLog:
    """The newest attempts of a job: when each began and why, who stayed, who was replaced."""

    def __init__(self) -> None:
        self._kept: deque[session_pb2.Attempt] = deque(maxlen=MOST_ATTEMPTS)

    def observe(self, decision: Decision, unix_s: float) -> None:
        """Takes a decision: an attempt begins with its reason."""
        job = decision.job
        if self._kept and self._kept[-1].number == job.attempt:
            known = self._kept.pop()
        else:
            known = session_pb2.Attempt(
                number=job.attempt, began_unix_s=unix_s, why=decision.reason
            )
        self._kept.append(_with_processes(known, job))

    @property
    def kept(self) -> Sequence[session_pb2.Attempt]:
        """The attempts, ascending."""
        return tuple(self._kept)


def _with_processes(attempt: session_pb2.Attempt, job: Job) -> session_pb2.Attempt:
    return session_pb2.Attempt(
        number=attempt.number,
        began_unix_s=attempt.began_unix_s,
        why=attempt.why,
        num_processes=max(attempt.num_processes, job.num_processes),
        stayed=len(job.staying),
        replaced=sorted(job.replaced)[:_MOST_NAMED],
    )


@dataclass(frozen=True)
class Errand:
    """What a launcher was asked to run, where, and when."""

    command: Sequence[str] = ()
    folder: str = field(default_factory=working_folder)
    began_unix_s: float = field(default_factory=time.time)

    def launcher(self, decision: Decision) -> session_pb2.Launcher:
        """Returns what the coordinator is told after a decision."""
        job = decision.job
        return session_pb2.Launcher(
            state=str(job.state),
            why=decision.reason,
            waiting_for=job.why_waiting if job.state is State.SCHEDULING else "",
            command=printable(shlex.join(self.command), lines=True),
            folder=printable(self.folder),
            began_unix_s=self.began_unix_s,
            attempt=job.attempt,
        )
