"""The errors of a job: one tree, with fields that survive pickling."""

from __future__ import annotations

import pickle

import pytest

from holdfast.coordination import HoldfastError
from holdfast.multihost import (
    Fatal,
    Hang,
    JobError,
    Preempted,
    StartupFailed,
    StartupTimeout,
    WorkerFailed,
)

KINDS = [StartupTimeout, StartupFailed, Preempted, WorkerFailed, Hang, Fatal]


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickled_error_keeps_its_fields(kind: type[JobError]) -> None:
    """Attempt, processes, times and the setting that governs it come back from another process."""
    error = kind(
        "it ended", attempt=3, processes=(1, 2), elapsed_s=4.5, timeout_s=4.0, knob="max_failures"
    )
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == "it ended"
    assert (again.attempt, again.processes, again.elapsed_s, again.timeout_s, again.knob) == (
        3,
        (1, 2),
        4.5,
        4.0,
        "max_failures",
    )


@pytest.mark.parametrize("kind", KINDS)
def test_fields_that_nobody_set_are_empty(kind: type[JobError]) -> None:
    """One `except JobError`, or `except HoldfastError`, catches all of them, and every field can be
    read.
    """
    error = kind("it ended")
    assert isinstance(error, JobError) and isinstance(error, HoldfastError)
    assert (error.attempt, error.processes, error.elapsed_s, error.timeout_s, error.knob) == (
        None,
        (),
        None,
        None,
        "",
    )
