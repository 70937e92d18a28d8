"""The seam between the supervisor and a place where processes run, and the loop between the two."""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast.coordination.diagnosis.summary import counted
from holdfast.coordination.diagnosis.verdict import BY_LAUNCHER
from holdfast.multihost import JobError, Preempted, StartupFailed

from .decide import decide
from .goodput import Goodput, GoodputMeter
from .job import (
    INTERRUPTED,
    Action,
    Decision,
    Event,
    Job,
    Launch,
    Rejoin,
    Replace,
    Reserve,
    Start,
    StartFailed,
    State,
    Tick,
)
from .ledger import Ledger


class Engine(Protocol):
    """A place to run processes, and the whole of what it has to offer."""

    def carry_out(self, action: Action) -> None:
        """Begins what `action` says, and does not wait for it. `events` reports what comes of it.

        Where a Reserve, Launch, Rejoin or Replace raises, the attempt has failed to start; with
        StartupFailed it would fail each time, and the job ends. The end of each process that was
        to start is reported, whether it has started or not.
        """

    def events(self, timeout_s: float | None) -> Sequence[Event]:
        """Returns what has happened since the last call.

        Waits up to `timeout_s` seconds for the first event, with None for ever.
        """

    def close(self) -> None:
        """Ends whatever still runs, waits for it, and gives everything back."""


@dataclass(frozen=True)
class JobResult:
    """How a job ended."""

    outcome: str  # "done", "preempted" (to be run again by whoever has machines) or "failed"
    job_id: str
    attempts: int
    exit_code: int
    error: JobError | None
    step: int
    saved_step: int
    reasons: tuple[str, ...]
    elapsed_s: float
    interrupted: bool = False  # by SIGINT
    goodput: Goodput = field(default_factory=Goodput)  # where the time went
    outlived: int = 0  # attempts in which processes stayed that had been in the one before

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as JSON holds them; `error` as its sentence."""
        error = None if self.error is None else str(self.error)
        return vars(self) | {
            "state": BY_LAUNCHER[self.outcome].value,
            "error": error,
            "reasons": list(self.reasons),
            "goodput": vars(self.goodput),
        }

    @property
    def summary(self) -> str:
        """How the job ended, in one line: the outcome and why, then the counts."""
        word = BY_LAUNCHER[self.outcome].value.lower()
        why = self.reasons[-1] if self.reasons else ""
        step = f"step {self.step}" if self.step >= 0 else "no step reported"
        saved = f", step {self.saved_step} saved" if self.saved_step >= 0 else ""
        counts = f"{counted(self.attempts, 'attempt')}, {step}{saved}, {self.elapsed_s:.1f} s"
        return f"{word}: {why}; {counts}, exit code {self.exit_code}"

    def raise_for_outcome(self) -> None:
        """Raises the error that ended the job, if one did."""
        if self.error is not None:
            raise self.error


def supervise(
    job: Job,
    engine: Engine,
    *,
    on_decision: Callable[[Job, Decision, Event, Ledger], None] = lambda *decided: None,
    clock: Callable[[], float] = time.monotonic,
) -> JobResult:
    """Runs `job` on `engine` to its end, and closes the engine. Blocks.

    `on_decision` sees each decision, with the job before it, the event and the history with it.
    """
    ledger = Ledger(GoodputMeter(clock()))
    before = job.attempt
    pending: deque[Event] = deque([Start()])
    try:
        while not job.final:
            if not pending:
                timeout_s = None if job.wake_at is None else max(0.0, job.wake_at - clock())
                pending.extend([*engine.events(timeout_s), Tick()])
            event = pending.popleft()
            now = clock()
            decision = decide(job, event, now)
            ledger = ledger.observe(job, decision, event, now, time.time())
            on_decision(job, decision, event, ledger)
            job = decision.job
            # A start that failed is decided upon before anything else.
            pending.extendleft(_carry_out(engine, decision))
    finally:
        engine.close()
    return _result(job, job.attempt - before, ledger, clock())


def _carry_out(engine: Engine, decision: Decision) -> list[Event]:
    for action in decision.actions:
        try:
            engine.carry_out(action)
        except Exception as error:
            if not isinstance(action, Reserve | Launch | Rejoin | Replace):
                raise
            return [start_failed(decision.job.attempt, error)]
    return []


def start_failed(attempt: int, error: Exception) -> StartFailed:
    """Returns the event of an attempt that could not start."""
    why = str(error) if isinstance(error, JobError) else f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        why += " in the launcher, which needs two for each process: raise its limit (ulimit -n)"
    final = isinstance(error, StartupFailed)
    return StartFailed(attempt, why, final, preempted=isinstance(error, Preempted))


def _result(job: Job, attempts: int, ledger: Ledger, now: float) -> JobResult:
    goodput = ledger.meter.goodput(now)
    interrupted = "SIGINT" in job.notices
    return JobResult(
        outcome="done" if job.state is State.FINISHED else str(job.state),
        job_id=job.job_id,
        attempts=attempts,
        exit_code=INTERRUPTED if interrupted else job.exit_code,
        error=job.error,
        step=job.step,
        saved_step=job.saved_step,
        reasons=ledger.reasons,
        elapsed_s=goodput.total_s,
        interrupted=interrupted,
        goodput=goodput,
        outlived=len(ledger.outlived),
    )
