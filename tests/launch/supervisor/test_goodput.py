"""Every second of a job belongs to one part, and the parts sum to the wall clock."""

from __future__ import annotations

import random

import pytest

from holdfast.coordination.diagnosis.summary import GOODPUT_PARTS
from holdfast.launch import RestartPolicy
from holdfast.launch.supervisor.decide import decide
from holdfast.launch.supervisor.goodput import Goodput, GoodputMeter
from holdfast.launch.supervisor.job import (
    Event,
    Exited,
    Job,
    Progressed,
    Reserved,
    Stalled,
    Start,
    Tick,
)


class Account:
    """A job and its meter, driven by events at times."""

    def __init__(self, processes: int = 1) -> None:
        policy = RestartPolicy(max_failures=5, backoff_s=1.0, backoff_jitter=0.0)
        self.job = Job("j", processes, processes, policy)
        self.meter = GoodputMeter(0.0)
        self.now = 0.0

    def at(self, now: float, event: Event) -> None:
        self.now = now
        self.job = decide(self.job, event, now).job
        self.meter.observe(self.job, event, now)

    @property
    def goodput(self) -> Goodput:
        return self.meter.goodput(self.now)


def test_who_has_come_to_shutdown_makes_no_steps() -> None:
    """A program that lives on for long after it has left its job neither steps nor hangs."""
    account = Account(2)
    account.at(0, Start())
    account.at(2, Reserved(1, 2))
    account.at(10, Progressed(1, 0))
    account.at(20, Progressed(1, 30, leaving=frozenset({0})))
    account.at(21, Progressed(1, 30, leaving=frozenset({0, 1})))
    account.at(100, Exited(1, 0, 0))
    account.at(130, Exited(1, 1, 0))
    assert account.goodput == Goodput(starting_s=10.0, stepping_s=11.0, ending_s=109.0)


def test_a_run_with_one_failure_is_accounted_for() -> None:
    """Starting, restoring, steps, saves, the end of the attempt, steps that are done again: by
    hand.
    """
    account = Account()
    account.at(0, Start())
    account.at(2, Reserved(1, 1))
    account.at(10, Progressed(1, 0, compiled_s=4.0))  # 6 s of starting, 4 s of compiling
    account.at(40, Progressed(1, 30, blocked_s=5.0, compiled_s=6.0))  # 23 s of steps, 5 s blocked
    account.at(44, Exited(1, 0, 1))  # 4 s more of steps
    account.at(45, Tick())  # 1 s of back-off
    account.at(46, Reserved(2, 1))
    account.at(
        55, Progressed(2, 21, restored_s=3.0)
    )  # 10 s from the end of the back-off, 3 s of them restoring
    account.at(64, Progressed(2, 30, restored_s=3.0))  # 9 s of steps that were done before
    account.at(65, Progressed(2, 31, restored_s=3.0))  # so was the one from 30 to 31 begun
    account.at(70, Exited(2, 0, 0))  # 5 s of new steps
    assert account.goodput == Goodput(
        starting_s=13.0,
        compiling_s=6.0,
        restoring_s=3.0,
        stepping_s=32.0,
        saving_s=5.0,
        redoing_s=10.0,
        ending_s=1.0,
    )
    assert account.goodput.total_s == 70.0 and account.goodput.fraction == 32 / 70


def test_joining_again_is_no_start() -> None:
    """From a death to the first step of an attempt in which a process stayed, less its restores."""
    account = Account(processes=2)
    account.at(0, Start())
    account.at(0, Reserved(1, 2))
    account.at(10, Progressed(1, 0, restartable=frozenset({0, 1})))
    account.at(20, Exited(1, 1, -9))
    account.at(24, Progressed(2, 0, restored_s=1.0))
    assert account.job.staying == {0}
    expected = Goodput(starting_s=10, rejoining_s=3, restoring_s=1, stepping_s=10)
    assert account.goodput == expected


def stepping(steps: int = 20) -> Account:
    """Returns the account of a job that has started for 10 s and made a step in each second."""
    account = Account()
    account.at(0, Start())
    account.at(0, Reserved(1, 1))
    for step in range(steps + 1):
        account.at(10 + step, Progressed(1, step))
    return account


def test_time_in_a_hang_is_no_progress() -> None:
    """While it lasts, after it has been ended, and after the job got on by itself."""
    account = stepping()
    assert account.meter.goodput(36.0).hung_s == 0.0  # 6 s: a step may take longer once
    assert account.meter.goodput(90.0) == Goodput(starting_s=10, stepping_s=21, hung_s=59)
    account.at(90, Progressed(1, 22))
    assert account.goodput == Goodput(starting_s=10, stepping_s=22, hung_s=58)
    account.at(120, Exited(1, 0, 1))
    assert account.goodput.hung_s == 88.0 and account.goodput.total_s == 120.0


def test_what_a_job_does_after_its_last_step_is_no_hang() -> None:
    """An evaluation or an export that takes long, once the job has ended well; until then nobody
    can know.
    """
    account = stepping()
    assert account.meter.goodput(90.0).hung_s == 59
    account.at(90, Exited(1, 0, 0))
    assert account.goodput == Goodput(starting_s=10, stepping_s=20, ending_s=60)
    account = stepping()
    account.at(90, Progressed(1, 20, leaving=frozenset({0})))
    account.at(91, Exited(1, 0, 0))
    assert account.goodput == Goodput(starting_s=10, stepping_s=20, ending_s=61)


def test_an_attempt_that_is_ended_as_hanging_has_hung() -> None:
    """The launcher's own time limit may be shorter than a hang that is only noticed."""
    account = stepping()
    account.at(36, Stalled(1, "no process has made a step for 6 s"))
    assert account.goodput == Goodput(starting_s=10, stepping_s=20, hung_s=6)


def test_a_save_that_blocks_is_no_hang() -> None:
    """Its seconds were no step's, and are known for what they are once it is over."""
    account = stepping()
    account.at(61, Progressed(1, 21, blocked_s=30.0))
    assert account.goodput == Goodput(starting_s=10, stepping_s=21, saving_s=30)


def test_slow_steps_are_no_hang() -> None:
    """A step of 30 s is none, neither the first nor the tenth; one of minutes is."""
    account = Account()
    account.at(0, Start())
    account.at(0, Reserved(1, 1))
    for step in range(11):
        account.at(10 + 30 * step, Progressed(1, step))
    assert account.meter.goodput(310 + 89).hung_s == 0.0
    assert account.meter.goodput(310 + 200).hung_s == 170.0


def test_waiting_for_machines_is_a_part() -> None:
    """From the word that there is no room, until there is."""
    account = Account()
    account.job = Job("j", 2, 2, RestartPolicy(max_failures=5))
    account.at(0, Start())
    account.at(1, Reserved(1, 1))
    account.at(31, Reserved(1, 2))
    account.at(35, Progressed(1, 0))
    assert account.goodput == Goodput(waiting_s=30, starting_s=5)


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
            compiled_s=lots.uniform(0, 99),
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
