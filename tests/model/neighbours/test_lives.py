"""Whatever other tools put in, at and beside a root: its steps are what they were, and so is what
the others have put there.
"""

from __future__ import annotations

import functools

import pytest

from ..campaign import check_lives

lives = functools.partial(check_lives, "tests.model.neighbours")


def test_roots_that_once_broke_a_rule_keep_it() -> None:
    """Each is the plainest that showed a defect."""
    lives("--found", timeout_s=110)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("share", range(2))
def test_many_roots_keep_the_rules(share: int) -> None:
    """Drawn by chance."""
    lives(f"--first={5000 + share}", "--lives=1200", "--every=2", timeout_s=880)
