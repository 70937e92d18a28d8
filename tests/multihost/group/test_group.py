"""Solo, and ClusterGroup over real clients of one service."""

from __future__ import annotations

import pytest

from holdfast.multihost import Solo


def test_solo_answers_without_anybody() -> None:
    """The group of one gives back what it was given."""
    solo = Solo()
    solo.barrier("b", timeout_s=1)
    solo.report(step=1)
    assert (solo.index, solo.count) == (0, 1)
    assert solo.gather("g", b"x", timeout_s=1) == [b"x"]
    assert solo.broadcast("c", b"y", timeout_s=1) == b"y"
    with pytest.raises(ValueError, match="rank 0 gives the value"):
        solo.broadcast("c", None, timeout_s=1)
