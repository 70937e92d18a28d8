"""A campaign ends, whatever its lives do."""

from __future__ import annotations

import pytest

from .campaign import check_lives


def test_a_life_that_hangs_diverges() -> None:
    """It is shown, by its seed."""
    with pytest.raises(AssertionError, match=r"seed 0 has not ended within 0\.1 s: a life"):
        check_lives("tests.model.hanging", "--lives", 1, timeout_s=60)
