"""Whatever way a process ends, what it has saved is whole, or it says what is not."""

from __future__ import annotations

import functools

import pytest

from ..campaign import check_lives
from .found import FOUND
from .lives import divergence_of

lives = functools.partial(check_lives, "tests.model.process_lives")


@pytest.mark.parametrize("name", list(FOUND)[:3])
def test_what_is_lost_most_easily_is_not(name: str) -> None:
    """Of a manager that is gone before its save has ended."""
    divergence = divergence_of(FOUND[name])
    assert divergence is None, str(divergence)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_lives_that_once_broke_a_rule_keep_it() -> None:
    """Each is the plainest that showed a defect."""
    lives("--found", timeout_s=280)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("share", range(2))
def test_many_lives_keep_the_rules(share: int) -> None:
    """Drawn by chance."""
    lives(f"--first={5000 + share}", "--lives=160", "--every=2", timeout_s=580)
