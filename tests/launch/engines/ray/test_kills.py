"""One kill of each kind against jobs on a real Ray cluster; `kills.py` runs more."""

from __future__ import annotations

import os

import pytest

from tests.support.libraries import need

from .kills import Campaign

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]
if os.environ.get("CI") != "true":
    need("ray", "make slow-libraries")


def test_whoever_is_lost_the_others_stay() -> None:
    """A process, two, an actor, a node by its processes or its daemon, with and without its relay,
    the replacement: who is not hit is not started again, and no saved step is lost.
    """
    campaign = Campaign(seed=20261127)
    campaign.run(len(campaign.kinds))
    assert not campaign.broken, "\n\n".join(campaign.broken)
    assert campaign.counts.total() == len(campaign.kinds)
