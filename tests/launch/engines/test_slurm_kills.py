"""One kill of each kind against jobs under a real Slurm; `slurm_kills.py` runs more."""

from __future__ import annotations

import pytest

from tests.support.slurm import require_slurm

from .slurm_kills import Campaign

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
require_slurm()


def test_whoever_is_lost_the_others_stay() -> None:
    """A process, two, a task, a node by its processes, its daemon or both, the replacement, a
    notice: who is not hit is not started again, and no saved step is lost.
    """
    campaign = Campaign(seed=20261128)
    campaign.run(len(campaign.kinds))
    assert not campaign.broken, "\n\n".join(campaign.broken)
    assert campaign.counts.total() == len(campaign.kinds)
