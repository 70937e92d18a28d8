"""Where the time of a job went: every second since its start belongs to one part. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from .job import Job, Progressed, State

RUNS = (State.RUNNING, State.PREEMPTING, State.RESIZING)
"""States in which processes run, and are meant to."""


@dataclass(frozen=True)
class Goodput:
    """Seconds of the wall clock by what the job did with them; they sum to the whole.

    `stepping_s` alone is progress: steps that were not done before. Of what all processes do, the
    one counts that took longest.
    """

    # waiting for machines, starting processes, joining, compiling: all until the first step
    starting_s: float = 0.0
    restoring_s: float = 0.0
    stepping_s: float = 0.0
    saving_s: float = 0.0  # in which the trainer was blocked in `save`
    redoing_s: float = 0.0  # steps that an earlier attempt had done
    ending_s: float = 0.0  # from a failure to the next start, the back-off included

    @property
    def total_s(self) -> float:
        """The seconds since the start."""
        return float(sum(getattr(self, each.name) for each in fields(self)))

    @property
    def fraction(self) -> float:
        """The share of progress, 0 to 1."""
        return self.stepping_s / self.total_s if self.total_s else 0.0


class GoodputMeter:
    """Accounts for the time between two events, by the state of the job in between.

    `goodput` may be called from any thread.
    """

    def __init__(self, now: float) -> None:
        self._at = now
        self._part = "starting_s"
        # Replaced as one: any thread may read it.
        self._known = (Goodput(), now, self._part)
        self._attempt = 0
        self._step = -1  # of this attempt
        self._best = -1  # of all before it
        self._restored_s = 0.0  # as reported in this attempt
        self._blocked_s = 0.0  # likewise
        self._seconds = dict.fromkeys((each.name for each in fields(Goodput)), 0.0)

    def observe(self, job: Job, event: object, now: float) -> None:
        """Takes an event and the job that it has led to."""
        self._seconds[self._part] += now - self._at
        self._at = now
        if job.attempt != self._attempt:
            self._attempt = job.attempt
            self._best = max(self._best, self._step)
            self._step = -1
            self._restored_s = 0.0
            self._blocked_s = 0.0
        if isinstance(event, Progressed) and event.attempt == job.attempt:
            self._step = max(self._step, event.step)
            self._move("starting_s", "restoring_s", event.restored_s - self._restored_s)
            self._move(self._part, "saving_s", event.blocked_s - self._blocked_s)
            self._restored_s = event.restored_s
            self._blocked_s = event.blocked_s
        self._part = self._part_of(job)
        self._known = (Goodput(**self._seconds), now, self._part)

    def _part_of(self, job: Job) -> str:
        if job.state not in RUNS:
            return "ending_s" if job.state is State.RESTARTING or job.final else "starting_s"
        if self._step < 0:
            return "starting_s"
        return "redoing_s" if self._step <= self._best else "stepping_s"

    def _move(self, source: str, target: str, seconds: float) -> None:
        """Counts some of the seconds of a part, which lay within them, for another."""
        moved = max(0.0, min(seconds, self._seconds[source]))
        self._seconds[source] -= moved
        self._seconds[target] += moved

    def goodput(self, now: float) -> Goodput:
        """Returns the account up to `now`."""
        known, at, part = self._known
        return replace(known, **{part: getattr(known, part) + now - at})
