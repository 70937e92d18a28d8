"""SaveForGoodput: its interval, its reason, and what a job gains by it, in virtual time."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from holdfast.checkpoint import AnyOf, EveryNSteps, PolicyContext, SaveCosts, SaveForGoodput
from holdfast.checkpoint.policy import uses_clock
from holdfast.checkpoint.scheduling.goodput import FIRST_S, daly_s
from holdfast.launch.supervisor.goodput import GoodputMeter
from holdfast.launch.supervisor.job import Job, Progressed, Start, State, Tick

HOUR_S = 3600.0


@pytest.mark.parametrize(
    ("costs", "interval_s"),
    [
        (SaveCosts(), FIRST_S),
        (SaveCosts(4.0, 30.0, 24, 24 * HOUR_S), 180.4),
        (SaveCosts(4.0, 400.0, 24, 24 * HOUR_S), 400.0),
        (SaveCosts(0.0, 0.0, 24, 24 * HOUR_S), 1.0),
        (SaveCosts(4.0, 30.0), 589.2),
        (SaveCosts(36000.0, 36000.0, 24, 24 * HOUR_S), 40008.2),
    ],
)
def test_the_interval(costs: SaveCosts, interval_s: float) -> None:
    """Daly's, but never less than a save takes; a minute before one was measured. Due once it has
    passed.
    """
    policy = SaveForGoodput()
    assert policy.interval_s(costs) == pytest.approx(interval_s, abs=0.1)
    assert not policy.wants(PolicyContext(7, elapsed_s=interval_s - 0.2, costs=costs))
    assert policy.wants(PolicyContext(7, elapsed_s=interval_s + 0.2, costs=costs))


def test_the_reason_has_the_choice_and_why() -> None:
    """What it rests on is in the sentence that the log shows."""
    costs = SaveCosts(4.0, 30.0, 24, 24 * HOUR_S)
    context = PolicyContext(7, elapsed_s=200, costs=costs)
    assert SaveForGoodput().wants(context) == (
        "200.0 s since the last save, of 180.4 s: a save blocks for 4 s and takes 30 s, and the job"
        " fails every 1.11 h (24 times in 24 h)"
    )
    assert "every 0.5 h (as given)" in SaveForGoodput(mtbf_s=1800).wants(context)
    assert "no save is measured yet" in SaveForGoodput().wants(PolicyContext(7, elapsed_s=61))


def test_it_goes_by_the_primarys_clock() -> None:
    """Where no clock may be asked it wants nothing, inside AnyOf too."""
    assert uses_clock(AnyOf(EveryNSteps(3), SaveForGoodput()))
    for costs in (SaveCosts(), SaveCosts(0.0, 0.0, 9, 9.0)):
        assert not SaveForGoodput().wants(PolicyContext(7, costs=costs))
    with pytest.raises(ValueError, match="SaveForGoodput: mtbf_s must be above 0, found 0"):
        SaveForGoodput(mtbf_s=0)


def test_the_best_interval_is_found() -> None:
    """It loses less than any other, by the exact expectation of Daly's model."""
    for blocked_s, failing_s in ((4.0, HOUR_S), (60.0, HOUR_S), (10.0, 168 * HOUR_S)):

        def slowness(work_s: float, blocked_s: float = blocked_s, m: float = failing_s) -> float:
            return m * (math.exp((work_s + blocked_s) / m) - 1) / work_s

        chosen_s = daly_s(blocked_s, failing_s)
        best = min(slowness(chosen_s * 1.05**power) for power in range(-40, 40))
        assert slowness(chosen_s) <= best * 1.0005


# --- a job that fails, in virtual time


@dataclass
class Trainer:
    """A job that trains, saves and fails at given times, and the supervisor's account of it.

    A save blocks for `blocked_s` and is there `save_s` after it began; a start takes `start_s`. The
    step is `step_s`.
    """

    failures: Sequence[float]
    blocked_s: float
    save_s: float
    start_s: float = 120.0
    step_s: float = 5.0

    def goodput(self, interval: Callable[[SaveCosts], float]) -> float:
        """Returns the share of the time that was progress."""
        meter = GoodputMeter(0.0)
        job = Job("job", 1, 1, state=State.RUNNING)
        now = 0.0
        saved = 0
        for attempt, failure in enumerate(self.failures, start=1):
            job = replace(job, attempt=attempt, state=State.RUNNING)
            meter.observe(job, Start(), now)
            now += self.start_s
            if now < failure:
                saved = self._train(meter, job, now, failure, step=saved, interval=interval)
            now = max(now, failure)
            job = replace(job, state=State.RESTARTING)
            meter.observe(job, Tick(), now)
        return meter.goodput(now).fraction

    def _train(
        self,
        meter: GoodputMeter,
        job: Job,
        now: float,
        failure: float,
        *,
        step: int,
        interval: Callable[[SaveCosts], float],
    ) -> int:
        """Trains from a step until the failure; returns the newest step that is saved then."""
        attempt = job.attempt
        blocked_s = 0.0
        saved = step
        last_s = now
        costs = SaveCosts(failures=attempt - 1, run_s=now)
        for _ in range(3):  # until its pace is known
            meter.observe(job, Progressed(attempt, step), now)
            step += 1
            now += self.step_s
        while True:
            due_s = last_s + interval(costs)
            steps = max(1, -int(-(due_s - now) // self.step_s))
            if now + steps * self.step_s >= failure:
                break
            step, now = self._run(meter, job, step, now, steps=steps, blocked_s=blocked_s)
            last_s = now
            now += self.blocked_s
            blocked_s += self.blocked_s
            if last_s + self.save_s < failure:
                saved = step
            costs = SaveCosts(self.blocked_s, self.save_s, attempt - 1, now)
        steps = max(0, int((failure - now) // self.step_s))
        self._run(meter, job, step, now, steps=steps, blocked_s=blocked_s)
        return saved

    def _run(
        self,
        meter: GoodputMeter,
        job: Job,
        step: int,
        now: float,
        *,
        steps: int,
        blocked_s: float,
    ) -> tuple[int, float]:
        # The account changes parts where a report passes the best step of all attempts.
        best = max(meter._best, step)
        for wanted in sorted({step, min(best + 1, step + steps), step + steps}):
            now += (wanted - step) * self.step_s
            step = wanted
            meter.observe(job, Progressed(job.attempt, step, blocked_s=blocked_s), now)
        return step, now


def failing(every_s: float, count: int) -> list[float]:
    rates = random.Random(7)
    return list(itertools.accumulate(rates.expovariate(1 / every_s) for _ in range(count)))


@pytest.mark.parametrize(("blocked_s", "save_s"), [(0.5, 20.0), (10.0, 120.0)])
@pytest.mark.parametrize(
    ("every_h", "count"),
    [
        (1, 40),
        pytest.param(6, 60, marks=pytest.mark.slow),
        pytest.param(24, 30, marks=pytest.mark.slow),
        pytest.param(168, 10, marks=pytest.mark.slow),
    ],
)
def test_a_job_gets_what_the_best_fixed_interval_gets(
    every_h: float, count: int, blocked_s: float, save_s: float
) -> None:
    """With failures from once an hour to once a week it comes within 3 % of the best fixed interval
    in hindsight, knowing nothing beforehand.
    """
    every_s = every_h * HOUR_S
    trainer = Trainer(failing(every_s, count), blocked_s, save_s)
    around_s = math.sqrt(2 * blocked_s * every_s)
    fixed = [max(around_s * 1.3**power, save_s) for power in range(-4, 5)]
    best = max(trainer.goodput(lambda _, s=seconds: s) for seconds in fixed)
    assert trainer.goodput(SaveForGoodput().interval_s) >= 0.97 * best
    # The account tells a bad interval from a good one.
    assert trainer.goodput(lambda _: 20 * around_s) < 0.99 * best
