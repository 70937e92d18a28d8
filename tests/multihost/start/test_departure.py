"""When a process ends itself that was to outlive an attempt.

`tests/launch/engines/test_rejoin.py` has the job around it, and the saves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import pytest

from holdfast.coordination import CoordinationClient, CoordinationError, JobIdentity
from holdfast.coordination.diagnosis.stacks import Frame, Thread
from holdfast.multihost import ProcessSpec
from holdfast.multihost.start.departure import Departure, ends_collectives
from holdfast.proto.session_pb2 import NextAttempt

NOBODY = "127.0.0.1:1"
TRAIN = Frame("/home/me/train.py", 12, "train")
CLEAN_UP = Frame("/home/me/train.py", 40, "clean_up")
FLOAT = Frame("/env/lib/python3.12/site-packages/jax/_src/array.py", 300, "__float__")
LOCK = Frame("/env/lib/python3.12/threading.py", 355, "wait")
COMPILE = Frame("/env/lib/python3.12/site-packages/jax/_src/compiler.py", 400, "backend_compile")


@pytest.fixture
def departure() -> Iterator[Departure]:
    """That of process 0, which asks nobody yet."""
    spec = ProcessSpec(process_id=0, num_processes=2, coordinator=NOBODY)
    client = CoordinationClient(NOBODY, 0, job=JobIdentity(num_processes=2, name="job", attempt=1))
    yield Departure(spec, client)
    client.close()


@pytest.mark.parametrize(
    ("frames", "asleep", "plainly", "unwinding"),
    [
        ((TRAIN,), True, True, True),  # in a compiled function
        ((TRAIN, FLOAT), True, True, True),
        ((TRAIN,), False, True, False),  # time.sleep, or a read
        ((TRAIN, CLEAN_UP), False, True, False),
        ((TRAIN, LOCK), False, True, False),
        ((TRAIN, COMPILE), False, False, False),
    ],
)
def test_what_does_not_end_is_told_from_what_unwinds(
    departure: Departure,
    frames: tuple[Frame, ...],
    asleep: bool,
    plainly: bool,
    unwinding: bool,
) -> None:
    """A process that has been in one place ends itself, unless it compiles, or handles an error in
    code of its own that waits for no device.
    """
    main = Thread("MainThread", frames, asleep)
    assert departure._may_end(main, NextAttempt()) == plainly
    try:
        raise RuntimeError("gloo")
    except RuntimeError:
        assert departure._may_end(main, NextAttempt()) == unwinding


@pytest.mark.parametrize(("implementation", "ends"), [("gloo", True), ("mpi", False)])
def test_whether_a_collective_ends_is_known_beforehand(implementation: str, ends: bool) -> None:
    """By what the platform's collectives are."""
    config: Any = jax.config
    before = config.jax_cpu_collectives_implementation
    config.update("jax_cpu_collectives_implementation", implementation)
    try:
        assert ends_collectives() == ends
    finally:
        config.update("jax_cpu_collectives_implementation", before)


def test_who_is_out_is_left_alone(departure: Departure) -> None:
    """Nothing is asked of the coordinator, which does not listen any more."""
    with pytest.raises(CoordinationError):
        departure.see_off(NextAttempt())
    departure.leave()
    departure.see_off(NextAttempt())
