"""Policies of keeping, as the manager asks them."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast.checkpoint.scheduling.scheduler import SaveScheduler
from holdfast.compat.orbax.roots import policies
from tests.support.checkpointing import groups


class _Own:
    """A policy of a program's, which may look at anything."""

    def should_preserve(self, checkpoints: Any, *, context: Any) -> Any:
        return [bool(each.metrics) for each in checkpoints]


BEST = policies.BestN(get_metric_fn=float)
WITHOUT = [
    policies.PreserveAll(),
    policies.LatestN(2),
    policies.EveryNSeconds(1),
    policies.LatestDuration(timedelta(1)),
    policies.EveryNSteps(2),
    policies.EveryNStepsClosest(2),
    policies.CustomSteps([1]),
]


@pytest.mark.parametrize(
    ("policy", "asks"),
    [
        *((policy, False) for policy in WITHOUT),
        (BEST, True),
        (_Own(), True),
        (policies.AnyPreservationPolicy(WITHOUT), False),
        (policies.AnyPreservationPolicy([*WITHOUT, BEST]), True),
    ],
    ids=lambda value: str(value) if isinstance(value, bool) else type(value).__name__,
)
def test_metrics_are_kept_for_who_may_ask(policy: Any, asks: bool) -> None:
    """A policy that goes by steps and times never does; one of a program's own may."""
    assert policies.asks_for_metrics(policy) is asks


class _Around:
    """A policy of a program's, around others."""

    def __init__(self, *policies: Any) -> None:
        self._policies = policies

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        return all(
            each.should_save(step, previous_steps, context=context) for each in self._policies
        )


CONTINUOUS = policies.ContinuousCheckpointingPolicy()


@pytest.mark.parametrize("around", [lambda policy: policies.AnySavePolicy([policy]), _Around])
def test_in_a_group_the_clock_is_the_primarys(around: Any) -> None:
    """Whether a save is in flight on a process is its own affair: all save the same steps, and the
    first one though some have not heard of a failure.
    """
    policy = policies.AnySavePolicy([policies.InitialSavePolicy(), around(CONTINUOUS)])
    busy = [False, True]
    previous: list[policies.PolicyCheckpointInfo] = []
    with groups(2) as members:
        schedulers = [
            SaveScheduler(
                policies.asking(policy, lambda: previous, lambda rank=rank: busy[rank], None),
                group,
                "s",
                skips=False,
            )
            for rank, group in enumerate(members)
        ]

        def wanted(step: int) -> list[bool]:
            return [bool(each.reason(step, busy=False)) for each in schedulers]

        assert wanted(1) == [True, True]
        previous.append(policies.PolicyCheckpointInfo(1, None, datetime.now(UTC)))
        for each in schedulers:
            each.started(1)
        for step in itertools.count(2):
            answers = wanted(step)
            assert answers[0] == answers[1]
            if all(answers):
                break
        for each in schedulers:
            each.close()
