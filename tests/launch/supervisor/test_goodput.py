"""Every second of a job belongs to one part, and the parts sum to the wall clock."""

from __future__ import annotations

import random

import pytest

from holdfast.coordination.diagnosis.summary import GOODPUT_PARTS
from holdfast.launch import RestartPolicy
from holdfast.launch.supervisor.decide import decide
from holdfast.launch.supervisor.goodput import Goodput, GoodputMeter
from holdfast.launch.supervisor.job import Event, Exited, Job, Progressed, Reserved, Start, Tick


class Account:
    """A job of one process and its meter, driven by events at times."""

    def __init__(self) -> None:
        self.job = Job("j", 1, 1, RestartPolicy(max_failures=5, backoff_s=1.0, backoff_jitter=0.0))
        self.meter = GoodputMeter(0.0)
        self.now = 0.0

    def at(self, now: float, event: Event) -> None:
        self.now = now
        self.job = decide(self.job, event, now).job
        self.meter.observe(self.job, event, now)

    @property
    def goodput(self) -> Goodput:
        return self.meter.goodput(self.now)


def test_a_run_with_one_failure_is_accounted_for() -> None:
    """Starting, restoring, steps, saves, the end of the attempt, steps that are done again: by
    hand.
    """
    account = Account()
    account.at(0, Start())
    account.at(2, Reserved(1, 1))
    account.at(10, Progressed(1, 0))  # 10 s of starting
    account.at(40, Progressed(1, 30, blocked_s=5.0))  # 25 s of steps, 5 s blocked in saves
    account.at(44, Exited(1, 0, 1))  # 4 s more of steps
    account.at(45, Tick())  # 1 s of back-off
    account.at(46, Reserved(2, 1))
    account.at(
        55, Progressed(2, 21, restored_s=3.0)
    )  # 10 s from the end of the back-off, 3 s of them restoring
    account.at(64, Progressed(2, 30, restored_s=3.0))  # 9 s of steps that were done before
    account.at(65, Progressed(2, 31, restored_s=3.0))  # so was the one from 30 to 31 begun
    account.at(75, Exited(2, 0, 0))  # 10 s of new steps
    assert account.goodput == Goodput(17.0, 3.0, 39.0, 5.0, 10.0, 1.0)
    assert account.goodput.total_s == 75.0 and account.goodput.fraction == 39 / 75


def test_a_new_job_has_no_fraction() -> None:
    """Nothing is divided by zero; the time since the last event counts."""
    meter = GoodputMeter(5.0)
    assert meter.goodput(5.0) == Goodput() and meter.goodput(5.0).fraction == 0.0
    assert meter.goodput(7.0) == Goodput(starting_s=2.0)


@pytest.mark.parametrize("seed", range(50))
def test_the_parts_sum_to_the_wall_clock(seed: int) -> None:
    """Whatever happens, and whatever processes say of themselves, no part is below zero and none is
    counted twice.
    """
    lots = random.Random(seed)
    account = Account()
    account.at(0, Start())
    for _ in range(200):
        attempt = account.job.attempt
        report = Progressed(
            attempt,
            lots.randint(-1, 90),
            restored_s=lots.uniform(0, 99),
            blocked_s=lots.uniform(0, 99),
        )
        account.at(
            account.now + lots.uniform(0, 5),
            lots.choice(
                [report, Tick(), Reserved(attempt, 1), Exited(attempt, 0, lots.randint(0, 1))]
            ),
        )
    parts = vars(account.goodput).values()
    assert min(parts) >= 0.0 and sum(parts) == pytest.approx(account.now)


def test_every_part_has_its_words() -> None:
    """The command line and the page say them."""
    assert set(GOODPUT_PARTS) == set(vars(Goodput()))
