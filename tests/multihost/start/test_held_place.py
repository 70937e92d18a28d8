"""A place in a job that one process of a host has."""

from __future__ import annotations

import dataclasses
import os

import pytest

from holdfast.multihost import ProcessSpec, StartupFailed
from holdfast.multihost.job import Job
from holdfast.multihost.start.held_place import HeldPlace

SPEC = ProcessSpec(process_id=1, num_processes=2, coordinator="held:1", job_id="j", attempt=3)
OTHERS = [
    dataclasses.replace(SPEC, process_id=0),
    dataclasses.replace(SPEC, attempt=4),
    dataclasses.replace(SPEC, job_id="k"),
    dataclasses.replace(SPEC, coordinator="held:2"),
]


def test_a_place_is_one_processs() -> None:
    """Others of the job, and those of other attempts and jobs, have places of their own. Who leaves
    the job leaves its place.
    """
    job = Job()
    job.put(HeldPlace(SPEC))
    for other in OTHERS:
        HeldPlace(other).close()
    expected = rf"process 1 of job 'j', attempt 3, lives on this host already \(pid {os.getpid()}\)"
    with pytest.raises(StartupFailed, match=expected) as caught:
        HeldPlace(SPEC)
    assert (caught.value.processes, caught.value.attempt) == ((1,), 3)
    job.close(HeldPlace)
    HeldPlace(SPEC).close()
