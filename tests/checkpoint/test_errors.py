"""Errors of a save: which of them cross between processes as themselves, and what the others
become.
"""

from __future__ import annotations

import errno
import os
import pickle

import pytest

from holdfast.checkpoint import CheckpointError, SaveFailed, StepExists
from holdfast.checkpoint.errors import (
    error_text,
    failure_of,
    naming_path,
)
from holdfast.coordination import BarrierTimeout, ProcessLost


@pytest.mark.parametrize(
    ("error", "message", "process"),
    [
        (
            OSError(28, "full"),
            "step 7 was not saved: process 2 failed: OSError: [Errno 28] full",
            2,
        ),
        (
            BarrierTimeout("1 of 2", missing=(1,)),
            "step 7 was not saved: 1 of 2",
            1,
        ),
        (
            BarrierTimeout("nobody knows"),
            "step 7 was not saved: nobody knows",
            None,
        ),
        (ProcessLost("it is gone", process=4), "step 7 was not saved: it is gone", 4),
    ],
)
def test_any_other_error_names_a_process(
    error: Exception, message: str, process: int | None
) -> None:
    """It is a SaveFailed of the step: of the process that is missing or lost, or of the one that
    failed.
    """
    found = failure_of(error, 7, 2)
    assert isinstance(found, SaveFailed) and (str(found), found.step, found.process) == (
        message,
        7,
        process,
    )


def test_an_error_that_can_be_sent_is_itself() -> None:
    """An error of the tree that all may raise is passed on as it is."""
    error = StepExists("there", step=1)
    assert failure_of(error, 7, 2) is error


def test_errors_pickle_with_their_fields() -> None:
    """An error comes back from another process of Python with its fields."""
    error = pickle.loads(pickle.dumps(SaveFailed("no", step=3, process=1, leaf="w", path="/x")))
    assert (error.step, error.process, error.leaf, error.path, error_text(error)) == (
        3,
        1,
        "w",
        "/x",
        "SaveFailed: no",
    )


@pytest.mark.parametrize(
    ("number", "filename", "message"),
    [
        (
            errno.EIO,
            "root/1/pack",
            (
                "root/1/pack cannot be read: Input/output error; look at the disk or the mount,"
                " then call it again"
            ),
        ),
        (
            errno.EIO,
            None,
            (
                "root cannot be read: Input/output error; look at the disk or the mount, then call"
                " it again"
            ),
        ),
        (
            errno.EMFILE,
            None,
            (
                "root cannot be read: Too many open files; this process has too many files open:"
                " raise its limit (ulimit -n)"
            ),
        ),
    ],
)
def test_errors_of_the_store_name_a_path(number: int, filename: str | None, message: str) -> None:
    """An OSError becomes a CheckpointError; the error's own file comes before the path of the
    call.
    """
    with pytest.raises(CheckpointError) as caught, naming_path("root"):
        raise OSError(number, os.strerror(number), filename)
    assert (caught.value.message, caught.value.path) == (message, filename or "root")
    assert isinstance(caught.value.__cause__, OSError)


def test_a_barrier_is_no_error_of_the_store() -> None:
    """It is a TimeoutError, and so an OSError, and goes through as it is."""
    with pytest.raises(BarrierTimeout), naming_path("root"):
        raise BarrierTimeout("late")
