"""What has happened in a life: each event, what was decided, and what was true then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from holdfast.launch.supervisor.engine import JobResult
from holdfast.launch.supervisor.job import (
    Decision,
    Event,
    Job,
    Kill,
    Replace,
    Stalled,
    State,
    Terminate,
)
from holdfast.launch.supervisor.ledger import Ledger

MOST_DECISIONS = 4000


class Endless(AssertionError):
    """A job does not end."""


@dataclass(frozen=True)
class Seen:
    """What is true of the last gang when a decision is taken."""

    alive: frozenset[int] = frozenset()
    needed: frozenset[int] = frozenset()  # by a save that can still be committed
    killed_at: dict[int, float] = field(default_factory=dict)
    surplus: frozenset[int] = frozenset()  # those of the gang before that still leave


@dataclass(frozen=True)
class Step:
    """One event, and what was decided."""

    now: float
    event: Event
    before: Job
    decision: Decision
    seen: Seen

    @property
    def after(self) -> Job:
        """The job that the decision has made."""
        return self.decision.job

    @property
    def is_new_attempt(self) -> bool:
        """Whether an attempt begins here."""
        return self.after.attempt != self.before.attempt

    @property
    def killed(self) -> frozenset[int]:
        """The living processes that get SIGKILL."""
        return self._hit(Kill)

    @property
    def terminated(self) -> frozenset[int]:
        """The living processes that are asked to end."""
        return self._hit(Terminate)

    @property
    def replaced(self) -> frozenset[int]:
        """The living processes that are ended to be started anew."""
        return self._hit(Replace)

    def _hit(self, kind: type[Kill] | type[Replace] | type[Terminate]) -> frozenset[int]:
        hit: frozenset[int] = frozenset()
        for action in self.decision.actions:
            if isinstance(action, kind):
                chosen = self.seen.alive if action.processes is None else action.processes
                hit |= chosen & self.seen.alive
        return hit

    def __str__(self) -> str:
        change = self.after.state.value
        if self.after.state is not self.before.state:
            change = f"{self.before.state} -> {change}"
        acted = "".join(f"; {action}" for action in self.decision.actions)
        return f"{self.now:8.2f} {self.event} | {change} | {self.decision.reason}{acted}"


@dataclass(frozen=True)
class Trace:
    """A life from its first event to its end."""

    steps: list[Step]
    result: JobResult

    def attempts(self) -> Iterator[list[Step]]:
        """Yields the steps of each attempt, without the one that begins it."""
        attempt: list[Step] = []
        for step in self.steps:
            if not step.is_new_attempt:
                attempt.append(step)
            elif attempt:
                yield attempt
                attempt = []
        yield attempt

    @property
    def last(self) -> Job:
        """The job as it has become."""
        return self.steps[-1].after


def _hang_before_the_latest_save(job: Job, event: Stalled) -> frozenset[int]:
    """Returns those that never come to it, though they can report."""
    latest = max((position.save for position in job.saves.values()), default=-1)
    hang = job.saves.keys() & (event.processes or job.alive)
    return frozenset(process for process in hang if job.saves[process].save < latest)


class Recorder:
    """Writes a trace."""

    def __init__(self, seen: Callable[[frozenset[int]], Seen], clock: Callable[[], float]) -> None:
        self.steps: list[Step] = []
        self._seen = seen
        self._clock = clock
        self._silent: frozenset[int] = frozenset()

    def on_decision(self, before: Job, decision: Decision, event: Event, ledger: Ledger) -> None:
        """Takes a decision about an event."""
        # While an attempt is ended, or all leave, a hang is nothing new.
        if isinstance(event, Stalled) and before.state is State.RUNNING:
            self._silent = event.silent | _hang_before_the_latest_save(before, event)
        elif decision.job.attempt != before.attempt:
            self._silent = frozenset()
        seen = self._seen(self._silent)
        self.steps.append(Step(self._clock(), event, before, decision, seen))
        if len(self.steps) > MOST_DECISIONS:
            raise Endless(f"{MOST_DECISIONS} decisions, and no end")
