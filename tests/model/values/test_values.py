"""Values and trees of others come back as they were, or are refused before a byte is written."""

from __future__ import annotations

import functools

import pytest

from ..campaign import check_lives

ROUNDS = 8  # of the draws of a share

draws = functools.partial(check_lives, "tests.model.values")


def test_a_share_of_draws_comes_back() -> None:
    """With those that once came back otherwise."""
    draws("--found", "--draws", 60, timeout_s=110)


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("share", range(4))
def test_many_draws_come_back(share: int) -> None:
    """By other seeds than the fast tests."""
    draws("--first", 1000 + ROUNDS * share, "--draws", 500 * ROUNDS // 2, timeout_s=900)
