"""The tree of errors: facts as attributes, codes in front of the sentence, and a journey between
processes.
"""

from __future__ import annotations

import copy
import pickle

import pytest

from holdfast.coordination import (
    BarrierTimeout,
    CoordinationError,
    CoordinatorLost,
    Fenced,
    HoldfastError,
    ProcessLost,
)


@pytest.mark.parametrize(
    ("error", "facts"),
    [
        (HoldfastError("m"), {}),
        (CoordinationError("m", code="NOT_FOUND"), {"code": "NOT_FOUND"}),
        (
            BarrierTimeout("m", name="b", missing=(1, 2)),
            {"code": "DEADLINE_EXCEEDED", "name": "b", "missing": (1, 2)},
        ),
        (
            ProcessLost("m", process=3, host="h", silent_s=1.5),
            {"code": "UNAVAILABLE", "process": 3, "host": "h", "silent_s": 1.5},
        ),
        (
            CoordinatorLost("m", address="a:1", tried_s=2.0),
            {"code": "UNAVAILABLE", "address": "a:1", "tried_s": 2.0},
        ),
        (Fenced("m"), {"code": "ABORTED"}),
    ],
)
def test_an_error_crosses_processes_with_its_facts(
    error: HoldfastError, facts: dict[str, object]
) -> None:
    """Pickled or copied, it has the same class, message and facts."""
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error) and again.message == "m" and str(again) == str(error)
        assert {name: getattr(again, name) for name in facts} == facts


def test_a_string_begins_with_the_code() -> None:
    """As jaxlib's do; the root's has none, and the message is the sentence alone."""
    assert (
        str(BarrierTimeout("late")) == "DEADLINE_EXCEEDED: late"
        and BarrierTimeout("late").message == "late"
    )
    assert str(HoldfastError("plain")) == "plain" and HoldfastError().message == ""


def test_a_barrier_timeout_is_a_timeout() -> None:
    """So programs that catch TimeoutError catch it."""
    assert issubclass(BarrierTimeout, TimeoutError) and issubclass(
        BarrierTimeout, CoordinationError
    )


def test_an_undeclared_fact_is_a_mistake() -> None:
    """TypeError with its name."""
    with pytest.raises(TypeError, match="CoordinationError has no fact named 'process'"):
        CoordinationError("m", process=3)
