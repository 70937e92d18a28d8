"""Unix time that does not jump."""

from __future__ import annotations

import time

import pytest

from holdfast.checkpoint.storage.steady_time import steady_time_s


def test_a_clock_that_is_set_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on by the monotonic clock, whatever the clock of the host says meanwhile."""
    before_s = steady_time_s()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert before_s <= steady_time_s() < before_s + 60
