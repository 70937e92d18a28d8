"""The job of a process: one client and spec, and one part of each class."""

from __future__ import annotations

import jax

from holdfast.checkpoint.saving import replicas
from holdfast.multihost import ProcessSpec
from holdfast.multihost.group import collectives
from holdfast.multihost.job import Job, clear_caches, current_job, forget_job


class Part:
    """Something that a wing above keeps in the job."""


def test_a_job_has_one_part_of_a_class() -> None:
    """A part is there once it was put or asked for, until it is taken."""
    job = Job()
    assert job.get(Part) is None and job.take(Part) is None
    made = job.ensure(Part)
    assert job.ensure(Part) is made and job.get(Part) is made
    later = Part()
    job.put(later)
    assert job.get(Part) is later and job.take(Part) is later and job.get(Part) is None


def test_leaving_forgets_client_and_spec_alone() -> None:
    """Other parts of the job stay: what is asked later is answered from what they knew."""
    job = Job()
    job.join("client", ProcessSpec(process_id=0, num_processes=1, coordinator="c:1"))
    part = job.ensure(Part)
    job.leave()
    assert job.client is None and job.spec is None and job.get(Part) is part


def test_a_child_begins_an_empty_job() -> None:
    """What a process forgets is returned, and nothing of it is in the next."""
    part = current_job().ensure(Part)
    earlier = forget_job()
    assert earlier.get(Part) is part and current_job() is not earlier
    assert current_job().get(Part) is None


def test_caches_of_devices_go_with_the_attempt() -> None:
    """The caches of reductions and of replicas' sums are among those that are emptied: a device in
    one keeps its backend, and the sockets of that, for others to wait at.
    """
    caches = [collectives._host_mesh, collectives._reduction, replicas._mesh, replicas._program]
    devices = tuple(jax.devices())
    collectives._host_mesh(devices)
    replicas._program(devices)
    clear_caches()
    assert [cache.cache_info().currsize for cache in caches] == [0, 0, 0, 0]
