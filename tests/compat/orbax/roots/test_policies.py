"""Policies of keeping, as the manager asks them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from holdfast.compat.orbax.roots import policies


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
