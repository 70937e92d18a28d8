"""The face of checkpoints answers as its model, life by life, each beside a plain dictionary."""

from __future__ import annotations

import functools

import pytest

from ..campaign import check_lives
from .settings import rows

SHARES = 120  # of the rows; the fast tests take one

lives = functools.partial(check_lives, "tests.model.checkpoint")


def test_lives_that_once_diverged_agree() -> None:
    """Each is the shortest that showed a defect."""
    lives("--found", timeout_s=110)


def test_a_share_of_lives_agrees() -> None:
    """Of those whose settings meet in pairs."""
    lives("--lives", len(rows()), "--every", SHARES, timeout_s=110)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_lives_with_paired_settings_agree() -> None:
    """Every two values of settings meet in one of these lives."""
    lives("--lives", len(rows()), timeout_s=900)


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("share", range(8))
def test_many_lives_agree(share: int) -> None:
    """With settings and operations by chance."""
    lives("--first", 1000 + 500 * share, "--lives", 500, timeout_s=900)
