"""Where the time of a job went: every second since its start belongs to one part. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields

from .job import Job, Progressed, Stalled, State

HUNG_S = 8.0
"""Without a step for so long, and for three usual steps, the time since the last step is lost."""
_UNPACED_S = 60.0  # for the first steps, before their pace is known

RUNS = (State.RUNNING, State.PREEMPTING)
"""States in which processes run, and are meant to."""
LIVES = (*RUNS, State.REJOINING)
"""States that an attempt is in until it has come to its end."""


@dataclass(frozen=True)
class Goodput:
    """Seconds of the wall clock by what the job did with them; they sum to the whole.

    `stepping_s` alone is progress: steps that were not done before. Of what all processes do, the
    one counts that took longest.
    """

    waiting_s: float = 0.0  # for machines
    # starting processes, joining, tracing: all until the first step
    starting_s: float = 0.0
    rejoining_s: float = 0.0  # likewise, in attempts that processes have outlived
    compiling_s: float = 0.0  # or loading what was compiled before; later programs too
    restoring_s: float = 0.0
    stepping_s: float = 0.0
    saving_s: float = 0.0  # in which the trainer was blocked in `save`
    redoing_s: float = 0.0  # steps that an earlier attempt had done
    hung_s: float = 0.0  # since the last step, where none came for too long
    # from a failure to the next start, the back-off included; after all have come to shutdown();
    # and from the last step to a good end, where that took too long for a step
    ending_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The seconds since the start."""
        return float(sum(getattr(self, each.name) for each in fields(self)))

    @property
    def fraction(self) -> float:
        """The share of progress, 0 to 1."""
        return self.stepping_s / self.total_s if self.total_s else 0.0


_STEPS = ("stepping_s", "redoing_s")  # parts that end in a hang where no step comes any more


@dataclass(frozen=True)
class _Pace:
    """How long a job's steps take: the mean of those that were no hang."""

    steps: int = 0
    seconds: float = 0.0

    @property
    def step_s(self) -> float:
        """The seconds of one step, 0 where that is not known."""
        return self.seconds / self.steps if self.steps else 0.0

    @property
    def limit_s(self) -> float:
        """How much longer than usual a step may take before the job hangs."""
        return max(HUNG_S, 3 * self.step_s) if self.steps else _UNPACED_S

    def after(self, steps: int, seconds: float) -> _Pace:
        """Returns the pace with so many more steps."""
        return _Pace(self.steps + steps, self.seconds + seconds)


class GoodputMeter:
    """Accounts for the time between two events, by the state of the job in between."""

    def __init__(self, now: float) -> None:
        self._at = now
        self._part = "starting_s"
        self._attempt = 0
        self._step = -1  # of this attempt
        self._since_step_s = 0.0  # of the part since its last step
        self._pace = _Pace()
        self._best = -1  # of all before it
        self._beginning = "starting_s"  # the part that this attempt begins with
        self._restored_s = 0.0  # as reported in this attempt
        self._blocked_s = 0.0  # likewise
        self._compiled_s = 0.0  # likewise
        self._seconds = dict.fromkeys((each.name for each in fields(Goodput)), 0.0)

    def observe(self, job: Job, event: object, now: float) -> None:
        """Takes an event and the job that it has led to. A copy that was made before stays."""
        self._seconds = dict(self._seconds)
        self._count(now)
        if isinstance(event, Stalled) and event.attempt == self._attempt:
            self._settle(0, hangs=True)
        if job.attempt != self._attempt:
            self._settle(0)
            self._begin(job)
        if isinstance(event, Progressed) and event.attempt == job.attempt:
            self._take(event)
        part = self._part_of(job)
        if part != self._part:
            ends_well = job.state in (*RUNS, State.FINISHED) and part == "ending_s"
            self._settle(0, lost="ending_s" if ends_well else "hung_s")
            self._part = part

    def _count(self, now: float) -> None:
        """Counts the time since the last event for the part that it was in."""
        passed_s = now - self._at
        self._seconds[self._part] += passed_s
        self._at = now
        if self._part in _STEPS:
            self._since_step_s += passed_s

    def _begin(self, job: Job) -> None:
        self._attempt = job.attempt
        self._beginning = "rejoining_s" if job.staying else "starting_s"
        self._best = max(self._best, self._step)
        self._step = -1
        self._restored_s = 0.0
        self._blocked_s = 0.0
        self._compiled_s = 0.0

    def _take(self, event: Progressed) -> None:
        """Takes what the processes report."""
        self._move(self._beginning, "restoring_s", event.restored_s - self._restored_s)
        moved_s = self._move(self._part, "saving_s", event.blocked_s - self._blocked_s)
        moved_s += self._move(self._part, "compiling_s", event.compiled_s - self._compiled_s)
        # A process that saves or compiles makes no step, and hangs no more for that.
        self._since_step_s = max(0.0, self._since_step_s - moved_s)
        self._restored_s = event.restored_s
        self._blocked_s = event.blocked_s
        self._compiled_s = event.compiled_s
        if event.step > self._step:
            if self._step >= 0:
                self._settle(event.step - self._step)
            self._step = event.step

    def _settle(self, steps: int, *, hangs: bool = False, lost: str = "hung_s") -> None:
        """Decides what the time since the last report was, in which so many steps were made.

        With `hangs` the attempt is ended for it, however short it was. `lost` is the part of what
        was too long for a step.
        """
        spent_s = self._since_step_s
        lost_s = spent_s - steps * self._pace.step_s
        if hangs or lost_s > self._pace.limit_s:
            self._move(self._part, lost, lost_s)
        elif steps:
            self._pace = self._pace.after(steps, spent_s)
        self._since_step_s = 0.0

    def _part_of(self, job: Job) -> str:
        if job.state is State.SCHEDULING and job.why_waiting:
            return "waiting_s"
        if job.state not in RUNS:
            return "ending_s" if job.state is State.RESTARTING or job.final else self._beginning
        if job.alive and job.alive <= job.leaving:
            return "ending_s"
        if self._step < 0:
            return self._beginning
        return "redoing_s" if self._step <= self._best else "stepping_s"

    def _move(self, source: str, target: str, seconds: float) -> float:
        """Counts some of the seconds of a part, which lay within them, for another; returns how
        many.
        """
        moved = max(0.0, min(seconds, self._seconds[source]))
        self._seconds[source] -= moved
        self._seconds[target] += moved
        return moved

    def goodput(self, now: float) -> Goodput:
        """Returns the account up to `now`, as if nothing came since the last event."""
        seconds = dict(self._seconds)
        passed_s = now - self._at
        seconds[self._part] += passed_s
        if self._part in _STEPS:
            lost_s = self._since_step_s + passed_s - self._pace.step_s
            if lost_s > self._pace.limit_s:
                seconds[self._part] -= lost_s
                seconds["hung_s"] += lost_s
        return Goodput(**seconds)
