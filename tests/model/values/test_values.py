"""Values and trees of others come back as they were, or are refused before a byte is written."""

from __future__ import annotations

import functools

from ..campaign import check_lives

draws = functools.partial(check_lives, "tests.model.values")


def test_draws_that_once_came_back_otherwise_are_kept() -> None:
    """Each is the shortest that showed a defect."""
    draws("--found", "--draws", 0, timeout_s=110)
