"""What has happened to a job, and what a launcher tells the coordinator of it, for the status."""

from __future__ import annotations

import copy
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from holdfast.coordination.diagnosis.summary import printable
from holdfast.coordination.process.job_folder import working_folder
from holdfast.proto import session_pb2

from .goodput import GoodputMeter
from .job import Decision, Event, Job, State

MOST_ATTEMPTS = 20
"""Of so many of the newest attempts the status knows who stayed."""
_MOST_NAMED = 32  # processes of an attempt


@dataclass(frozen=True)
class Ledger:
    """The history of a job up to its last event, which any thread may read."""

    meter: GoodputMeter  # where its time went
    reasons: tuple[str, ...] = ()  # of what was done
    attempts: tuple[session_pb2.Attempt, ...] = ()  # the newest, ascending
    outlived: frozenset[int] = frozenset()  # attempts with processes of the one before

    def observe(
        self, before: Job, decision: Decision, event: Event, now: float, unix_s: float
    ) -> Ledger:
        """Returns the history with one more event, and what was decided for it. Pure.

        `unix_s` is what the host's clock shows now: it may have been set since the last event.
        """
        job = decision.job
        following = replace(self, meter=copy.copy(self.meter))
        following.meter.observe(job, event, now)
        if job.state is before.state and not decision.actions:
            return following
        known = {attempt.number: attempt for attempt in self.attempts}
        began = session_pb2.Attempt(number=job.attempt, began_unix_s=unix_s, why=decision.reason)
        known[job.attempt] = _with_processes(known.get(job.attempt, began), job)
        return replace(
            following,
            reasons=(*self.reasons, decision.reason),
            attempts=tuple(known.values())[-MOST_ATTEMPTS:],
            outlived=self.outlived | ({job.attempt} if job.staying else set()),
        )


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

    def launcher(self, decision: Decision, ledger: Ledger) -> session_pb2.Launcher:
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
            attempts=ledger.attempts,
        )
