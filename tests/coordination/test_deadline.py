"""A deadline is one budget for one call."""

from __future__ import annotations

import math
import queue
import time

import pytest

from holdfast.coordination.deadline import Deadline


def test_time_that_passes_is_counted() -> None:
    """What has elapsed and what is left add up to the whole."""
    deadline = Deadline(100)
    begun = time.monotonic()
    while time.monotonic() == begun:
        pass
    assert deadline.elapsed_s() > 0 and not deadline.passed()
    assert abs(deadline.elapsed_s() + deadline.remaining_s() - 100) < 1
    assert repr(deadline).startswith("Deadline(99.9") or repr(deadline).startswith(
        "Deadline(100.000"
    )


def test_a_deadline_that_is_over() -> None:
    """Nothing is left, but a wire is never told 0 ms, which often means for ever."""
    for timeout_s in (0, -1):
        deadline = Deadline(timeout_s)
        assert deadline.passed() and deadline.remaining_s() == 0 and deadline.remaining_ms() == 1
    assert 9_000 < Deadline(10).remaining_ms() <= 10_000


def test_a_deadline_is_a_number() -> None:
    """Time is never over at nan."""
    with pytest.raises(ValueError, match="a timeout of nan: expected a number of seconds"):
        Deadline(float("nan"))


@pytest.mark.parametrize("timeout_s", [math.inf, 1e12])
def test_a_deadline_may_be_for_ever(timeout_s: float) -> None:
    """What is left can be waited for, and told on a wire: no wait is refused for its length."""
    deadline = Deadline(timeout_s)
    inbox: queue.SimpleQueue[str] = queue.SimpleQueue()
    inbox.put("came")
    assert inbox.get(timeout=deadline.remaining_s()) == "came"
    empty: queue.SimpleQueue[str] = queue.SimpleQueue()
    with pytest.raises(queue.Empty):
        empty.get(timeout=min(deadline.remaining_s(), 0.01))
    assert not deadline.passed() and deadline.remaining_ms() < 2**63
