"""How often to save so that a job loses the least time: to saves, and to failures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ..policy import PolicyContext, SaveCosts, need_positive

FIRST_S = 60.0  # after so long the first save comes, and is measured
LEAST_S = 1.0  # between two saves, whatever they cost
# What is taken for known before a job has failed: a quarter of a failure in three hours.
PRIOR_FAILURES = 0.25
PRIOR_S = 3 * 3600.0


@dataclass(frozen=True)
class SaveForGoodput:
    """Saves as often as costs the least: what saves block, against what a failure throws away.

    `mtbf_s` is the mean time between two failures of the job, in seconds. None: it is measured,
    where holdfast's launcher starts the job again (the starts after the first, over the time since
    the first); twelve hours to begin with. What a save blocks and takes is measured by the primary,
    for each lane: as `Local(save_policy=)` it goes by the costs of local saves. The first save of a
    manager comes after a minute.

    The interval is that of J. T. Daly, "A higher order estimate of the optimum checkpoint interval
    for restart dumps" (2006), which refines Young's sqrt(2 blocked mtbf); never less than a save
    takes.
    """

    mtbf_s: float | None = None
    uses_clock: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.mtbf_s is not None:
            need_positive("SaveForGoodput", "mtbf_s", self.mtbf_s)

    def wants(self, context: PolicyContext) -> str:
        """Returns a reason, with what it rests on, once the interval has passed."""
        costs = context.costs
        interval_s = self.interval_s(costs)
        if context.elapsed_s < interval_s:
            return ""
        passed = f"{context.elapsed_s:.1f} s since the last save, of {interval_s:.1f} s"
        if costs.blocked_s is None:
            return f"{passed}: no save is measured yet"
        known = "as given" if self.mtbf_s is not None else _measured(costs)
        return (
            f"{passed}: a save blocks for {costs.blocked_s:.3g} s and takes {costs.save_s:.3g} s,"
            f" and the job fails every {self.failing_s(costs) / 3600:.3g} h ({known})"
        )

    def interval_s(self, costs: SaveCosts) -> float:
        """Returns the seconds from the begin of one save to that of the next."""
        if costs.blocked_s is None:
            return FIRST_S
        best_s = daly_s(costs.blocked_s, self.failing_s(costs)) + costs.blocked_s
        return max(LEAST_S, costs.save_s, best_s)

    def failing_s(self, costs: SaveCosts) -> float:
        """Returns the mean time between two failures, in seconds."""
        if self.mtbf_s is not None:
            return self.mtbf_s
        return (costs.run_s + PRIOR_S) / (costs.failures + PRIOR_FAILURES)


def daly_s(blocked_s: float, failing_s: float) -> float:
    """Returns the seconds of work between two saves that lose the least time (Daly 2006, eq. 37).

    Saves block for `blocked_s`; failures come every `failing_s` in the mean.
    """
    if blocked_s >= 2 * failing_s:
        return failing_s
    share = blocked_s / (2 * failing_s)
    work_s = math.sqrt(2 * blocked_s * failing_s) * (1 + math.sqrt(share) / 3 + share / 9)
    return work_s - blocked_s


def _measured(costs: SaveCosts) -> str:
    times = "once" if costs.failures == 1 else f"{costs.failures} times"
    return f"{times} in {costs.run_s / 3600:.3g} h"
